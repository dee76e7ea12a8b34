"""Memory of flat tensors on the CPU, taken once and used again.

The pages of a new tensor of a model's size cost more than what is computed in them: the system has
to find and clear each when it is first written to. So a block of memory, once it is not needed any
more, waits here for the next tensor of its size. And it comes from numpy, which asks for huge pages
(torch does not): there are five hundred times fewer to find, when new and in every later pass.

**When a block is free.** A tensor made here keeps its block alive as any tensor made by
``torch.from_numpy`` keeps its array: the storage owns it, whatever shares the storage (views, what
autograd saved, arrays of numpy) keeps the storage, and the block comes back when the storage is
gone. Nothing is counted or guessed, and nobody can see a tensor change that is still his.

**How much waits.** At most twice as many bytes as are in use, or as many as were in use at once a
while ago, as in every pass: no more than two more copies of what training keeps, or what a pass
takes. Once nothing is in use, no more than 32 MiB wait.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

__all__ = ["Pool", "empty", "pool"]

_Block: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

# Bytes below which the pages that malloc holds back serve as well.
_LEAST = 1 << 19
_ALIGNMENT = 64
# Bytes that may always wait, for small models whose passes are all that takes a block.
_SPARE = 1 << 25
# After how many loans and returns what was in use before counts e times less.
_WHILE = 512
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
# As large a block as glibc's malloc learns from (mallopt(3), M_MMAP_THRESHOLD): once it was given
# back, up to twice as much stays with the process, and what a step frees the next one need not ask
# the system for, page by page. Nothing is ever written to it, so it has no pages itself.
torch.empty((32 << 20) - (1 << 12), dtype=torch.uint8)


@final
class Pool:
    """Blocks of memory that are lent to tensors and come back.

    Safe to use from several threads, and from a destructor that runs in the middle of its own code:
    nobody waits for the lock. Who finds it taken leaves a note to whoever holds it.
    """

    def __init__(self, least: int = _LEAST, spare: int = _SPARE) -> None:
        self._least, self._spare = least, spare
        self._lent = self._most = 0
        self._idle: list[_Block] = []  # the longest idle first
        self._notes: deque[tuple[int, _Block | None]] = deque()
        self._lock = threading.Lock()

    @property
    def lent(self) -> int:
        """Bytes in use."""
        return self._lent

    @property
    def idle(self) -> int:
        """Bytes that wait to be used."""
        return sum(block.nbytes for block in self._idle)

    def empty(self, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of ``n`` elements of any content."""
        size = n * dtype.itemsize
        if device.type != "cpu" or dtype not in _NUMPY or size < self._least:
            return torch.empty(n, dtype=dtype, device=device)
        block = self._waiting(size)
        start = -block.ctypes.data % _ALIGNMENT
        lease = block[start : start + size].view(_NUMPY[dtype])
        weakref.finalize(lease, self._note, -block.nbytes, block).atexit = False
        self._note(block.nbytes, None)
        return torch.from_numpy(lease)

    def _waiting(self, size: int) -> _Block:
        """A block for ``size`` bytes: one that waits, or a new one."""
        full = size + _ALIGNMENT
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
                for index in reversed(range(len(self._idle))):
                    if self._idle[index].nbytes == full:
                        return self._idle.pop(index)
            finally:
                self._lock.release()
        return np.empty(full, dtype=np.uint8)

    def _note(self, change: int, back: _Block | None) -> None:
        """Note that ``change`` more bytes are lent, and which block came back."""
        self._notes.append((change, back))
        while self._notes and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._notes:
            change, back = self._notes.popleft()
            self._lent += change
            if back is not None:
                self._idle.append(back)
            self._most = max(self._lent, self._most - self._most // _WHILE)
        in_passes = max(2 * self._lent, self._most) if self._lent else 0
        while self._idle and self.idle > max(in_passes, self._spare):
            del self._idle[0]


pool = Pool()
empty = pool.empty
