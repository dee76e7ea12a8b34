"""What every test starts from, and what none may leave behind."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,  # the first example pays for torch's warm-up
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# Lightning sets these when it starts a strategy or seeds, and never takes them back.
LIGHTNINGS_OWN = {
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "RANK",
    "WORLD_SIZE",
}
# Set once per process: by pytest, by OpenMP, by importing Lightning, by torch's compiler.
NOT_A_LEAK = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}

_GLOBALS: dict[str, tuple[Callable[[], object], Callable[[object], object]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's thread count": (torch.get_num_threads, torch.set_num_threads),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's deterministic mode": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "torch's matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "the working directory": (os.getcwd, os.chdir),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with a reason, what this machine cannot run, and trace what coverage is asked of.

    That is not whole runs of Lightning; and of a test with many cases every fourth says enough:
    tracing takes as long as the tests do.
    """
    cases = Counter[str]()
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases[name := item.nodeid.partition("[")[0]] += 1
            if "trainer" in item.path.parts or (cases[name] > 16 and cases[name] % 4):
                item.add_marker(pytest.mark.no_cover)
    lacking = {}
    if not torch.cuda.is_available():
        lacking["gpu"] = pytest.mark.skip(reason="torch sees no CUDA device")
    if not (dist.is_available() and dist.is_gloo_available()):
        lacking["dist"] = pytest.mark.skip(reason="this torch was built without gloo")
    for item in items:
        for mark in lacking.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(lacking[mark])


@pytest.fixture(autouse=True)
def _random_state_is_given_back() -> Iterator[None]:
    """Start every test from the same global streams, and hand the old ones back after it."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(cpu)


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """Reset every global a test changed; fail the test unless Lightning is the one who leaks it."""
    environ = dict(os.environ)
    values = {name: get() for name, (get, _) in _GLOBALS.items()}
    yield
    leaks = []
    for name, (get, put) in _GLOBALS.items():
        if get() != values[name]:
            leaks.append(f"{name}: {values[name]} became {get()}")
            put(values[name])
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # Lightning keeps it until the interpreter exits
    changed = {k for k in environ.keys() | os.environ.keys() if environ.get(k) != os.environ.get(k)}
    for name in changed - NOT_A_LEAK:
        if name not in LIGHTNINGS_OWN:
            leaks.append(f"${name}: {environ.get(name)!r} became {os.environ.get(name)!r}")
        if name in environ:
            os.environ[name] = environ[name]
        else:
            del os.environ[name]
    if leaks:
        pytest.fail("the test leaks " + "; ".join(sorted(leaks)), pytrace=False)
