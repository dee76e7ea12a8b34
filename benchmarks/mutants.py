"""Break one line at a time of what privacy depends on, and see whether the tests notice.

    OMP_NUM_THREADS=1 python benchmarks/mutants.py               # all of mutants.json, in a copy
    OMP_NUM_THREADS=1 python benchmarks/mutants.py noise _run    # those of files with such names
    python benchmarks/mutants.py --check                         # only whether all can be tried

``mutants.json`` has, for each file, the tests that guard it, and mutants: text that is in the file
once, what takes its place, and, if need be, ``tests`` of its own, such as those of several ranks,
and, of one that changes no guarantee, ``why``. Tests are files, or tests in them, as pytest takes
them; all must pass on what is right, or a mutant could seem noticed that is not. Prints all mutants
as they are tried, writes the table's rows in ``docs/threat-model.md``, and fails if one has
survived without a reason. Each is tried in a fork of a process that has the large imports done;
tests that killed one before go first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/threat-model.md"
BEGIN, END = (f"<!-- {word}: benchmarks/mutants.py -->" for word in ("begin", "end"))
HEAD = ["| file | mutants | survived | why that changes no guarantee |", "|---|---|---|---|"]
COPIED = ("opake_lightning", "tests", "benchmarks", "examples", "docs", "pyproject.toml")
PRELOADED = [
    "cryptography",
    "dp_accounting.pld",
    "lightning.pytorch",
    "numpy",
    "optree",
    "pytest",
    "scipy.signal",
    "scipy.stats",
    "torch",
    "torch.func",
    "torchmetrics",
    "torchopt",
]
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--show-capture=no"]
# Of plugins of pytest's that what is imported before has imported.
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
SLOW_TOO = ["-m", "not gpu"]
TIMEOUT = 240  # a mutant that hangs is one that was noticed
LONG_TIMEOUT = 3600  # of all tests that any mutant of a file has, on what is right


class Trial:
    """A copy of the repository, and what runs tests in it."""

    def __init__(self, folder: Path) -> None:
        self.copy, self.log, self._failed = folder / "copy", folder / "log", folder / "failed"
        for part in COPIED:
            source, target = ROOT / part, self.copy / part
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)

    def failure(self, tests: list[str], timeout: float = TIMEOUT) -> str | None:
        """The first of ``tests`` that fails, "" if that cannot be told; None if all pass."""
        if not tests:  # pytest would run all there are
            return None
        self._failed.write_text("")
        child = os.fork()
        if not child:
            os.setsid()
            try:
                os._exit(self._run(tests))
            finally:  # the folder is the parent's
                traceback.print_exc()
                os._exit(2)
        deadline = time.monotonic() + timeout
        try:
            while time.monotonic() < deadline:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    return self._failed.read_text() if status else None
                time.sleep(0.05)
            return ""
        finally:  # also what it has started, such as ranks that wait for each other
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)

    def _run(self, tests: list[str]) -> int:
        import pytest

        out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(self.copy)
        sys.path.insert(0, str(self.copy))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, it is off
        os.environ["PYTHONPATH"] = str(self.copy)  # of the processes that tests start
        return int(pytest.main([*OPTIONS, *tests], plugins=[self]) != 0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note which test has failed."""
        if report.failed:
            self._failed.write_text(report.nodeid)


def under_tests(names: list[str]) -> list[str]:
    return [f"tests/{name}" for name in names]


def try_file(
    trial: Trial, file: str, tests: list[str], mutants: list[dict[str, Any]]
) -> list[bool]:
    """Try all mutants of a file; which of them have survived."""
    path = trial.copy / "opake_lightning" / file
    right = path.read_text()
    own = dict.fromkeys(name for mutant in mutants for name in mutant.get("tests", ()))
    for found in (tests, [*SLOW_TOO, *under_tests([*own])] if own else []):
        if trial.failure(found, LONG_TIMEOUT) is not None:
            raise RuntimeError(f"{file}: a test fails on what is right\n{trial.log.read_text()}")
    killers: list[str] = []
    survived: list[bool] = []
    for mutant in mutants:
        old, new, begun = mutant["old"], mutant["new"], time.monotonic()
        path.write_text(right.replace(old, new))
        if "tests" in mutant:
            killer = trial.failure([*SLOW_TOO, *under_tests(mutant["tests"])])
        else:  # apart, as pytest runs all tests of a file that is named, too, in their own order
            killer = trial.failure(killers) if killers else None
            if killer is None and (killer := trial.failure(tests)):
                killers.append(killer)
        survived.append(killer is None)
        verdict = "SURVIVED" if killer is None else "killed"
        known = f"  ({mutant['why']})" if "why" in mutant else ""
        print(f"{verdict} {time.monotonic() - begun:4.0f} s {file}: {old!r} -> {new!r}{known}")
        sys.stdout.flush()
    path.write_text(right)
    return survived


def row_of(file: str, survived: list[bool], mutants: list[dict[str, Any]]) -> str:
    left = [m for lives, m in zip(survived, mutants, strict=True) if lives]
    reasons = (m.get("why", f"**{m['old']!r} as {m['new']!r}**") for m in left)
    why = "; ".join(dict.fromkeys(reasons))  # each once
    return f"| `{file}` | {len(survived)} | {len(left) or ''} | {why} |"


def write(rows: dict[str, str], order: list[str]) -> None:
    """Put rows into the table of the page; those of files that were not tried stay."""
    head, rest = PAGE.read_text().split(BEGIN)
    table, tail = rest.split(END)
    rows = {line.split("`")[1]: line for line in table.splitlines() if "`" in line} | rows
    lines = [*HEAD, *(rows[file] for file in order if file in rows)]
    PAGE.write_text("".join([head, BEGIN, "\n".join(["", "", *lines, "", ""]), END, tail]))


def check(parts: dict[str, Any]) -> None:
    """See that each mutant is one change, and that the files of its tests are there."""
    for file, part in parts.items():
        text = (ROOT / "opake_lightning" / file).read_text()
        for mutant in part["mutants"]:
            if text.count(mutant["old"]) != 1:
                raise ValueError(f"{file}: {text.count(mutant['old'])} times {mutant['old']!r}")
            if mutant["old"] == mutant["new"]:
                raise ValueError(f"{file}: {mutant['old']!r} is left as it is")
            for name in mutant.get("tests", part["tests"]):
                if not (ROOT / "tests" / name.split("::")[0]).exists():
                    raise ValueError(f"{file}: there is no tests/{name}")


def main() -> int:
    """Try the mutants of the files that are named; how many survived, and nobody knows why."""
    description, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="parts of names of files; all if left out")
    parser.add_argument("--check", action="store_true", help="try none")
    options = parser.parse_args()
    names: list[str] = options.names
    suite: dict[str, Any] = json.loads((ROOT / "benchmarks/mutants.json").read_text())
    parts = {f: p for f, p in suite.items() if not names or any(name in f for name in names)}
    check(parts)
    if options.check:
        print(f"{sum(len(part['mutants']) for part in parts.values())} of {len(parts)} files")
        return 0
    for module in PRELOADED:
        __import__(module)
    unexplained = 0
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder))
        for file, part in parts.items():
            mutants = part["mutants"]
            survived = try_file(trial, file, under_tests(part["tests"]), mutants)
            write({file: row_of(file, survived, mutants)}, list(suite))
            unexplained += sum(
                lives and "why" not in mutant
                for lives, mutant in zip(survived, mutants, strict=True)
            )
    return unexplained


if __name__ == "__main__":
    sys.exit(main() and 1)
