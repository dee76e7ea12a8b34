"""However the ranks are started, they make the run that one process makes, and end together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "launched.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
STARTED: dict[str, tuple[list[str], str]] = {
    "subprocess": ([sys.executable], "opake_ddp"),
    "spawn": ([sys.executable], "opake_ddp_spawn"),
    "fork": ([sys.executable], "opake_ddp_fork"),
    "notebook": ([sys.executable], "opake_ddp_notebook"),
    "forkserver": ([sys.executable], "forkserver"),
    "torchrun": ([*TORCHRUN, "--standalone", "--nproc-per-node=2"], "opake_ddp"),
}

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ways = pytest.mark.parametrize("way", STARTED)


def start(command: list[str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, str(SCRIPT), *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    process = start([sys.executable], str(folder), "opake_ddp", "1", "1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-4000:]
    return torch.load(folder / "rank0.pt")


@ways
def test_two_ranks_learn_what_one_does(alone, tmp_path, way):
    command, strategy = STARTED[way]
    process = start(command, str(tmp_path), strategy, "2", "1")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-4000:]
    files = list(tmp_path.glob("rank*.pt"))
    assert len(files) == (2 if way in ("subprocess", "torchrun") else 1)
    for file in files:
        result = torch.load(file)
        assert result["steps"] == alone["steps"] == 6
        torch.testing.assert_close(result["learned"], alone["learned"], rtol=0, atol=1e-6)


@ways
@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_rank_that_fails_ends_all(tmp_path, way, how):
    command, strategy = STARTED[way]
    began = time.monotonic()
    process = start(command, str(tmp_path), strategy, "2", "1", how)
    output, _ = process.communicate(timeout=120)
    assert time.monotonic() - began < 90
    assert process.returncode != 0
    if how == "raise":
        assert "ValueError: the loss of the user" in output, output[-4000:]
    else:  # what watches the processes may be faster than rank 0 in saying so
        told = "exited without an error", "terminated with code 3", "exit code 3", "exitcode: 3"
        assert any(words in output for words in told), output[-4000:]
    assert not list(tmp_path.glob("rank*.pt"))


# -- two machines ---------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def two_networks():
    """Names of two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command to make network namespaces with")
    unique = uuid.uuid4().hex[:6]
    names = [f"opake{unique}{end}" for end in "ab"]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ends = [f"v{name[5:]}" for name in names]
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"this machine lets us make no network namespaces: {error.stderr!r}")
        yield list(zip(names, ends, strict=True))
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20)


def on_two_nodes(networks, *arguments: str) -> list[subprocess.Popen[str]]:
    started = []
    for node, (name, end) in enumerate(networks):
        command = ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={end}", *TORCHRUN]
        command += ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
        command += ["--master-addr=10.77.0.1", "--master-port=29511"]
        started.append(start(command, *arguments))
    return started


def test_two_machines_learn_what_one_does(alone, two_networks, tmp_path):
    processes = on_two_nodes(two_networks, str(tmp_path), "opake_ddp", "1", "2")
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output[-4000:]
    for rank in range(2):
        result = torch.load(tmp_path / f"rank{rank}.pt")
        assert result["steps"] == 6
        torch.testing.assert_close(result["learned"], alone["learned"], rtol=0, atol=1e-6)


def test_a_machine_that_fails_ends_the_other(two_networks, tmp_path):
    processes = on_two_nodes(two_networks, str(tmp_path), "opake_ddp", "1", "2", "raise")
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert all(process.returncode != 0 for process in processes)
    assert "rank 1 failed: ValueError: the loss of the user" in outputs[0], outputs[0][-4000:]
