"""What a measurement depends on: machine, package, and the memory that this process holds."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import torch

import opake_lightning

__all__ = ["described", "environment_of", "package", "require", "reset_peak", "resident"]


def described() -> str:
    """Version of torch, threads, vector width of its kernels, load."""
    return (
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, load {os.getloadavg()[0]:.1f}"
    )


def package() -> Path:
    """The checkout that ``opake_lightning`` was imported from."""
    return Path(opake_lightning.__file__).resolve().parents[1]


def environment_of(checkout: Path | None) -> dict[str, str]:
    """This process's environment, or that of a child that imports the package of ``checkout``."""
    if checkout is None:
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": str(checkout.resolve())}


def require(checkout: Path | None, imported: str) -> None:
    """Refuse to call a measurement of one package that of another."""
    if checkout is not None and Path(imported) != checkout.resolve():
        raise SystemExit(f"{checkout} holds no opake_lightning; {imported} was measured instead")


def resident(field: str) -> int:
    """Bytes of this process, now (VmRSS) or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])  # type: ignore[index]


def reset_peak() -> None:
    """Forget the peak so far, where the system lets us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
