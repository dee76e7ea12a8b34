"""Argument checks, written so that NaN fails every one of them."""

from __future__ import annotations

import math

__all__ = ["at_least", "fraction", "non_negative", "positive", "positive_int", "size_of_noise"]

# Far enough from the ends of float32's range (1e-45 and 3e38) that a Gaussian of this size keeps
# its shape, and a gradient of this norm its digits.
_SIZES = (1e-35, 1e35)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name} must be a number, got {value!r} of type {type(value).__name__}{_plain(value)}"
        )
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def positive(name: str, value: object, *, why: str = "") -> float:
    """Return ``value`` as a float if it is finite and greater than zero."""
    number = _number(name, value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}{_because(why)}")
    return number


def non_negative(name: str, value: object, *, why: str = "") -> float:
    """Return ``value`` as a float if it is finite and at least zero."""
    number = _number(name, value)
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}{_because(why)}")
    return number


def fraction(name: str, value: object, *, zero: bool, one: bool, why: str = "") -> float:
    """Return ``value`` as a float if it lies between 0 and 1, ends included as asked."""
    number = _number(name, value)
    if not (0 < number < 1 or (zero and number == 0) or (one and number == 1)):
        interval = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
        raise ValueError(f"{name} must be in {interval}, got {value!r}{_because(why)}")
    return number


def at_least(name: str, value: object, least: int, *, why: str = "") -> int:
    """Return ``value`` if it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} must be an int, got {value!r} of type {type(value).__name__}{_plain(value)}"
        )
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value!r}{_because(why)}")
    return value


def positive_int(name: str, value: object, *, why: str = "") -> int:
    """Return ``value`` if it is an integer greater than zero."""
    return at_least(name, value, 1, why=why)


def size_of_noise(name: str, value: float) -> float:
    """Return ``value`` if it is 0, or float32 can tell numbers of about this size apart.

    Noise of 1e-46 would be none at all, while the gradient under it rounds up to 1e-45.
    """
    least, most = _SIZES
    if not (value == 0 or least <= value <= most):
        raise ValueError(
            f"{name} is {value!r}, which float32 cannot hold with all its digits: it must be "
            f"between {least} and {most}; rescale the loss and clipping_norm with it"
        )
    return value


def _plain(value: object) -> str:
    """What to do with a number that comes in a box, of numpy's or torch's."""
    return "; pass what its .item() returns" if hasattr(value, "item") else ""


def _because(why: str) -> str:
    return f" ({why})" if why else ""
