"""Loading never runs code: nothing in the package unpickles what it did not get from itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import opake_lightning

FILES = sorted(Path(opake_lightning.__file__).parent.rglob("*.py"))

UNPICKLERS = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("jsonpickle", "pickletools", "yaml"),
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
LOADERS = {"load", "loads", "Unpickler", "read_pickle"}


def complaints(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.partition(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.partition(".")[0] in UNPICKLERS or module == "torch.serialization":
                found.append(module)
            found += [f"{module}.{a.name}" for a in node.names if a.name in LOADERS]
        elif isinstance(node, ast.Call):
            found += about_call(node)
    return found


def about_call(call: ast.Call) -> list[str]:
    called, options = ast.unparse(call.func), {k.arg: k.value for k in call.keywords}
    found = [called] if called in BUILTINS else []
    if called.rpartition(".")[2] in LOADERS and called != "json.loads":
        safe = options.get("weights_only")
        if not (called == "torch.load" and isinstance(safe, ast.Constant) and safe.value is True):
            found.append(f"{called} without weights_only=True")
    for name, wrong in (("weights_only", False), ("allow_pickle", True)):
        given = options.get(name)
        if isinstance(given, ast.Constant) and given.value is wrong:
            found.append(f"{name}={wrong}")
    if "safe_globals" in called:
        found.append(called)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_can_run_what_it_loads(file):
    assert complaints(file.read_text(encoding="utf-8")) == []


def test_files_are_looked_at():
    assert {"strategy.py", "_checkpoint_io.py", "module.py", "serialization.py"} <= {
        file.name for file in FILES
    }


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import dill as d",
        "from pickle import loads",
        "from torch import load",
        "from torch.serialization import add_safe_globals",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "torch.serialization.add_safe_globals([X])",
        "super().load_checkpoint(path, weights_only=False)",
        "np.load(f)",
        "joblib.load(f)",
        "np.lib.npyio.read(f, allow_pickle=True)",
        "eval(text)",
        "__import__(name)",
    ],
)
def test_what_could_is_found(source):
    assert complaints(source)


def test_what_cannot_is_not():
    assert complaints("torch.load(f, weights_only=True)\njson.loads(t)\nx.load_state_dict(s)") == []
