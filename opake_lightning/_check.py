"""Argument checks, written so that NaN fails every one of them."""

from __future__ import annotations

import math

__all__ = ["at_least", "fraction", "non_negative", "positive", "positive_int"]


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return float(value)


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
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value!r}{_because(why)}")
    return value


def positive_int(name: str, value: object, *, why: str = "") -> int:
    """Return ``value`` if it is an integer greater than zero."""
    return at_least(name, value, 1, why=why)


def _because(why: str) -> str:
    return f" ({why})" if why else ""
