"""The shape of the project: what the core may import, how long a file is, what is documented."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import opake_lightning

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MODULES = [
    info.name for info in pkgutil.walk_packages(opake_lightning.__path__, "opake_lightning.")
]
CORE = [name for name in MODULES if not name.startswith("opake_lightning.trainer")]
PUBLIC = [name for name in MODULES if not any(p.startswith("_") for p in name.split("."))]
DIRECTIVE = re.compile(r"^\.\. auto(?P<kind>module|function|class|data)::\s*(?P<name>\S+)", re.M)

# Each module is imported in its own fork, so that none is found already loaded by another.
WITHOUT_LIGHTNING = """
import os, sys, traceback

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"lightning", "lightning_fabric", "pytorch_lightning"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch, optree, torchopt, dp_accounting
sys.stdout.flush()
failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            __import__(name)
        except BaseException:
            traceback.print_exc(limit=-1)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"cannot be imported without Lightning: {failed}" if failed else 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this system lacks")
def test_core_imports_without_lightning() -> None:
    command = [sys.executable, "-c", WITHOUT_LIGHTNING, "opake_lightning", *CORE]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def test_no_file_is_so_long_that_it_must_be_two() -> None:
    """Past 500 lines ask whether a reader would rather have two; past 900 there is no question."""
    folders = ("opake_lightning", "tests", "examples", "benchmarks", "docs")
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {path: n for path, n in lengths.items() if n > 900} == {}


def test_the_import_contract_covers_every_core_module() -> None:
    tops = {name.split(".")[1] for name in CORE}
    no_lightning = next(
        contract
        for contract in PYPROJECT["tool"]["importlinter"]["contracts"]
        if "lightning" in contract.get("forbidden_modules", ())
    )
    assert {f"opake_lightning.{name}" for name in tops} <= set(no_lightning["source_modules"])


def documented() -> set[int]:
    """The objects (by identity) that have an entry in docs/api."""
    entries: set[int] = set()
    for page in (ROOT / "docs" / "api").rglob("*.md"):
        for directive in DIRECTIVE.finditer(page.read_text(encoding="utf-8")):
            if directive["kind"] == "module":
                module = importlib.import_module(directive["name"])
                entries.update(id(getattr(module, name)) for name in module.__all__)
            else:
                path, _, name = directive["name"].rpartition(".")
                entries.add(id(getattr(importlib.import_module(path), name)))
    return entries


def public_names() -> Iterator[tuple[str, object]]:
    for path in ["opake_lightning", *PUBLIC]:
        module = importlib.import_module(path)
        for name in getattr(module, "__all__", ()):
            yield f"{path}.{name}", getattr(module, name)


def test_every_public_name_has_a_docs_entry() -> None:
    entries = documented()
    missing = [
        name
        for name, value in public_names()
        if id(value) not in entries and not name.rpartition(".")[2].startswith("__")
    ]
    assert missing == []


def test_every_public_function_and_class_says_what_it_does() -> None:
    silent = [
        name
        for name, value in public_names()
        if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value)
    ]
    assert silent == []
