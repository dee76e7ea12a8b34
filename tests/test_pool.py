from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opake_lightning._pool import Pool
from opake_lightning._tree import layout_of, pack, unpack
from opake_lightning.optimizers import adam, sgd

N = 1000
CPU = torch.device("cpu")


def make(pool: Pool) -> Tensor:
    return pool.empty(N, torch.float32, CPU)


def saved_by_autograd(flat: Tensor) -> Tensor:
    return (torch.ones(N, requires_grad=True) * flat[:N]).sum()


def closure(flat: Tensor) -> Callable[[], Tensor]:
    return lambda: flat


def other_storage_of_same_memory(flat: Tensor) -> Tensor:
    return torch.from_numpy(flat[3:].numpy())


def set_data(flat: Tensor) -> Tensor:
    other = torch.empty(0)
    other.data = flat[5:9]
    return other


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda flat: flat[:2],
    "strided": lambda flat: flat.as_strided((3,), (2,), 7),
    "detached": lambda flat: flat.detach()[:1],
    "array": lambda flat: flat.numpy()[10:20],
    "memoryview": lambda flat: memoryview(flat.numpy()),
    "dlpack": lambda flat: np.from_dlpack(flat),
    "tensor of array": other_storage_of_same_memory,
    "storage": lambda flat: flat.untyped_storage(),
    "data": set_data,
    "parameter": lambda flat: torch.nn.Parameter(flat),
    "other type": lambda flat: flat.view(torch.int32),
    "graph": saved_by_autograd,
    "closure": closure,
    "cycle": lambda flat: [[flat]],
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
def test_memory_that_somebody_holds_is_not_given_out(hold: Callable[[Tensor], Any]) -> None:
    pool = Pool(least=0, spare=0)
    anchor = make(pool)  # while something is lent, blocks wait
    flat = make(pool)
    address = flat.data_ptr()
    held = hold(flat)
    del flat
    others = [make(pool) for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    del held
    gc.collect()
    assert make(pool).data_ptr() == address, "and it is once nobody does"
    del anchor


def test_values_stay_while_the_pool_is_busy() -> None:
    pool = Pool(least=0, spare=0)
    rng = np.random.default_rng(0)
    held: list[tuple[Tensor, float]] = []
    for step in range(400):
        flat = make(pool).fill_(step)
        start = int(rng.integers(N - 5))
        held.append((flat[start : start + 5], float(step)))
        del flat
        if len(held) > 6:
            held.pop(int(rng.integers(len(held))))
    assert all(torch.equal(view, torch.full((5,), value)) for view, value in held)
    assert pool.idle <= 2 * pool.lent


def test_shared_memory_is_not_the_pools_any_more() -> None:
    pool = Pool(least=0, spare=0)
    anchor, flat = make(pool), make(pool).fill_(1)
    flat.share_memory_()
    other = make(pool).fill_(2)
    assert flat.is_shared()
    assert torch.equal(flat, torch.ones(N))
    del anchor, other


def test_a_copy_outlives_its_original() -> None:
    pool = Pool(least=0, spare=0)
    flat = make(pool).fill_(3)
    copy = pickle.loads(pickle.dumps(flat[:4]))
    del flat
    make(pool).fill_(4)
    assert torch.equal(copy, torch.full((4,), 3.0))


def test_nothing_waits_when_nothing_is_in_use() -> None:
    pool = Pool(least=0, spare=0)
    flats = [make(pool) for _ in range(5)]
    del flats[1:]
    assert pool.idle == 4 * pool.lent  # as in a pass, after which the next one begins
    for _ in range(4000):
        make(pool)
    assert 0 < pool.idle <= 2 * pool.lent
    del flats
    assert (pool.idle, pool.lent) == (0, 0)


def test_some_memory_waits_for_a_small_model() -> None:
    block = make(Pool(least=0)).nbytes + 64  # and what aligns it
    pool = Pool(least=0, spare=2 * block)
    flats = [make(pool) for _ in range(5)]
    del flats
    assert (pool.idle, pool.lent) == (2 * block, 0)


def test_threads_never_share_memory() -> None:
    pool = Pool(least=0, spare=0)
    wrong: list[str] = []

    def work(mark: int) -> None:
        kept: list[Tensor] = []
        for _ in range(300):
            kept.append(make(pool).fill_(mark)[mark:])
            if len(kept) > 3:
                kept.pop(0)
            wrong.extend("changed" for view in kept if not bool((view == mark).all()))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert (pool.idle, pool.lent) == (0, 0)


def test_a_destructor_may_run_in_the_middle() -> None:
    pool = Pool(least=0, spare=0)
    anchor, flat = make(pool), make(pool)
    with pool._lock:
        del flat  # must neither wait for the lock nor be forgotten
    assert pool.lent == 2 * (N * 4 + 64)
    make(pool)
    assert (pool.idle, pool.lent) == (N * 4 + 64, N * 4 + 64)
    del anchor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_are_what_torch_makes(dtype: torch.dtype) -> None:
    flat = Pool(least=0, spare=0).empty(N, dtype, CPU)
    assert (flat.shape, flat.dtype, flat.device) == ((N,), dtype, CPU)
    assert flat.is_contiguous()
    assert flat.data_ptr() % 64 == 0
    assert flat._version == 0


def test_a_small_tensor_is_left_to_torch() -> None:
    pool = Pool()
    flat = pool.empty(10, torch.float32, CPU)
    assert pool.lent == 0
    assert pool.empty(0, torch.float32, CPU).shape == (0,)
    assert flat.shape == (10,)


@pytest.mark.parametrize("make_optimizer", [lambda: sgd(0.1, momentum=0.9), lambda: adam(0.1)])
def test_old_states_and_updates_keep_their_values(make_optimizer: Callable[[], Any]) -> None:
    """Every step's results are kept, as views only, and compared with copies made at once."""
    n, optimizer = 300_000, make_optimizer()
    params = {"a": torch.zeros(n), "b": torch.zeros(7)}
    state = optimizer.init(params)
    seen: list[tuple[Tensor, Tensor]] = []
    for step in range(12):
        gradient = {"a": torch.full((n,), step + 1.0), "b": torch.ones(7)}
        updates, state = optimizer.update(gradient, state, params=params)
        view = updates["a"][100:103]
        seen.append((view, view.clone()))
        if step % 3 == 0:
            del seen[:1]
    assert all(torch.equal(view, copy) for view, copy in seen)


@pytest.mark.parametrize("packed", [True, False])
def test_a_pure_update_leaves_large_arguments_alone(packed: bool) -> None:
    shapes = [(300_000,), (3,)]
    params, gradient = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    if packed:
        layout = layout_of(gradient)
        gradient = unpack(pack(gradient, layout), layout)
    optimizer = adam(0.1, weight_decay=0.1)
    state = optimizer.init(params)
    for _ in range(3):
        arguments = [*params, *gradient, *state["first_moment"].mean]
        before = [(leaf._version, leaf.clone()) for leaf in arguments]
        _, state = optimizer.update(gradient, state, params=params)
        for leaf, (version, copy) in zip(arguments, before, strict=True):
            assert leaf._version == version
            assert torch.equal(leaf, copy)
