"""Keys: 128 secret bits, from the operating system, a file, the environment, or a number.

They are made public by :mod:`opake_lightning.random`, which draws from them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import string
from dataclasses import dataclass
from pathlib import Path

from opake_lightning import _check
from opake_lightning.errors import PrivacyError

__all__ = [
    "BITS",
    "RngKey",
    "fold_in",
    "fresh_key",
    "key",
    "key_from_environment",
    "key_from_file",
    "require_key",
    "split",
    "write_key_file",
]

BITS = 128
_DIGITS = frozenset(string.hexdigits)


@dataclass(frozen=True, slots=True, repr=False)
class RngKey:
    """128 secret bits. Whoever knows them can subtract the noise, so they are never printed.

    Attributes:
        bits: The key as an integer in [0, 2**128).
    """

    bits: int

    def __post_init__(self) -> None:
        """Check the range."""
        # What was given may be a key in another form, so no message repeats it.
        if type(self.bits) is not int:
            raise TypeError(f"a key's bits are an int, not a {type(self.bits).__name__}")
        if self.bits >> BITS:
            raise ValueError("a key must be in [0, 2¹²⁸)")

    def __repr__(self) -> str:
        """Hide the bits: a repr ends up in logs and hyperparameter files."""
        return "RngKey(<secret>)"

    def hex(self) -> str:
        """The key as 32 hexadecimal digits, for a checkpoint or a key file. Secret."""
        return f"{self.bits:032x}"

    @classmethod
    def from_hex(cls, digits: str) -> RngKey:
        """The key that :meth:`hex` wrote.

        Raises:
            ValueError: If ``digits`` are not 32 hexadecimal digits; does not repeat them.
        """
        if len(digits) != BITS // 4 or not _DIGITS.issuperset(digits):
            raise ValueError(
                f"a key is written as {BITS // 4} hexadecimal digits, but {len(digits)} characters"
                " were found, or others than these"
            )
        return cls(int(digits, 16))

    def digest(self) -> str:
        """32 hexadecimal digits that tell keys apart; public.

        They do not help to find a key that cannot be guessed. Of one that can, such as ``key(7)``,
        they tell who guesses that it was right.

        >>> key(7).digest() == key(7).digest() != key(8).digest()
        True
        """
        # Unlike what fold_in makes, no key: whatever words are folded in, none comes to this.
        return f"{_digest(b'digest', self.bits.to_bytes(BITS // 8, 'big'), ''):032x}"


def key(seed: int) -> RngKey:
    """A reproducible key. For runs that protect real people, use :func:`fresh_key`.

    Args:
        seed: Any integer >= 0. Whoever can guess it can recompute the noise.

    >>> key(7) == key(7), key(7) == key(8)
    (True, False)
    """
    seed = _check.at_least("seed", seed, 0)
    return RngKey(_digest(b"key", b"", seed))


def fresh_key() -> RngKey:
    """A key from 128 bits of operating-system entropy."""
    return RngKey(secrets.randbits(BITS))


def write_key_file(path: str | os.PathLike[str]) -> None:
    """Write a new key, from the operating system's entropy, to a file that only its owner can read.

    Keep a copy where the checkpoints are not: without the key, a run that was trained with
    ``key_in_checkpoint=False`` cannot be resumed.

    Args:
        path: The file to make; it must not be there yet, because overwriting a key would make
            every checkpoint that needs it useless.

    Raises:
        FileExistsError: If there is something at ``path``.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{fresh_key().hex()}\n")
        file.flush()
        os.fsync(descriptor)


def key_from_file(path: str | os.PathLike[str]) -> RngKey:
    """The key in a file, such as :func:`write_key_file` makes.

    Guarantee: no part of the file's content is in an error message.

    Args:
        path: A file of 32 hexadecimal digits, which only its owner may read (mode 0600 or 0400).

    Raises:
        PrivacyError: If others may read or write the file.
        ValueError: If it does not hold a key.
    """
    with Path(path).open("rb") as file:
        # Of the file that was opened, not of what may lie at the path by now.
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if os.name == "posix" and mode & 0o077:
            raise PrivacyError(
                f"the key file {path} has mode {mode:04o}, so others than its owner may read it or "
                "write to it; if nobody has, run chmod 600 on it, else make another key with "
                "random.write_key_file"
            )
        return _key_in(file.read(1 << 10), f"the key file {path}")


def key_from_environment(name: str) -> RngKey:
    """The key in an environment variable, for where secrets are handed over like that.

    Every process that this one starts gets the variable, too, as ranks must. Other programs that
    run as the same user can read it, and some experiment trackers store the whole environment: a
    file is safer.

    Args:
        name: The variable's name; its value is 32 hexadecimal digits.

    Raises:
        PrivacyError: If the variable is not set.
        ValueError: If it does not hold a key; does not repeat what it holds.

    >>> key_from_environment("NO_SUCH_KEY")
    Traceback (most recent call last):
    opake_lightning.errors.PrivacyError: the environment variable NO_SUCH_KEY is not set; ...
    """
    value = os.environ.get(name)
    if value is None:
        raise PrivacyError(
            f"the environment variable {name} is not set; it must hold the run's key, on every "
            "machine and rank: 32 hexadecimal digits, as random.write_key_file writes them"
        )
    return _key_in(os.fsencode(value), f"the environment variable {name}")


def fold_in(rng: RngKey, data: int | str) -> RngKey:
    """The key derived from ``rng`` for one purpose (a word) or one step (a number).

    >>> fold_in(key(7), "noise") == fold_in(key(7), "noise")
    True
    >>> fold_in(key(7), 1) == fold_in(key(7), "1")
    False
    """
    require_key(rng)
    if not isinstance(data, str):
        data = _check.at_least("data", data, 0)
    return RngKey(_digest(b"fold_in", rng.bits.to_bytes(BITS // 8, "big"), data))


def split(rng: RngKey, n: int = 2) -> tuple[RngKey, ...]:
    """``n`` keys that are unrelated to each other and to ``rng``.

    >>> len(set(split(key(7), 3)) | {key(7)})
    4
    """
    child = fold_in(rng, "split")
    return tuple(fold_in(child, index) for index in range(_check.at_least("n", n, 1)))


def _key_in(content: bytes, where: str) -> RngKey:
    try:
        return RngKey.from_hex(content.decode("latin-1").strip())
    except ValueError as error:
        raise ValueError(
            f"{where} holds no key: {error}; make one with random.write_key_file"
        ) from None


def _digest(tag: bytes, rng: bytes, data: int | str) -> int:
    if isinstance(data, str):
        payload, kind = data.encode(), b"s"
    else:
        payload, kind = data.to_bytes((data.bit_length() + 7) // 8 or 1, "big"), b"i"
    message = b"opake_lightning\0" + tag + b"\0" + kind + payload
    return int.from_bytes(hashlib.blake2b(message, key=rng, digest_size=BITS // 8).digest(), "big")


def require_key(rng: object) -> None:
    """Refuse what is no key."""
    if not isinstance(rng, RngKey):
        raise TypeError(
            f"expected an RngKey, got a {type(rng).__name__}; make one with random.key(seed) to "
            "reproduce a run, or random.fresh_key()"
        )
