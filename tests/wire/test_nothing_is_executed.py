"""Nothing that a peer sent is unpickled, evaluated or loaded as code: every place that could is known, with the reason.

The syntax tree of the whole package is searched for what turns bytes or strings into objects of any class, or into
code. A new such place must be added to `ALLOWED`, with the origin of its input. Folders in `UNTRUSTED_INPUT` have none,
because they read from workers and nodes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import farstep

ROOT = Path(farstep.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PICKLES = ("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "pandas", "yaml")
"""Modules of which only what writes may be used anywhere."""
WRITES = {
    "dumps",
    "dump",
    "register_pickle_by_value",
    "unregister_pickle_by_value",
    "list_registry_pickle_by_value",
    "PicklingError",
    "Pickler",
    "safe_load",
}
EXECUTES = {
    *("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "runpy.run_path", "runpy.run_module"),
    *("importlib.import_module", "importlib.util.spec_from_file_location", "ctypes.CDLL"),
    *("torch.load", "torch.jit.load", "numpy.load", "numpy.lib.format.read_array"),
}
IN_STRINGS = re.compile(r"(pickle|marshal|torch)\.loads?\b")
FROM_THE_HEAD = "the worker's: from the head, which it has authenticated and which decides what it runs"
ALLOWED = {
    ("__init__.py", "__getattr__"): "the package's own modules, by names of a table in the same file",
    ("learners/__init__.py", "__getattr__"): "the package's own modules, by names of a table in the same file",
    ("testing/__init__.py", "__getattr__"): "the package's own modules, by names of a table in the same file",
    ("agents/base_weights.py", ""): FROM_THE_HEAD,
    ("agents/tape/program.py", "__init__"): "source that this process has just written from a recording of its own",
    ("cli/options/config_file.py", "_read"): "YAML of a file that the user names, with the safe loader",
    ("cli/kubernetes.py", "main"): "writes YAML, reads none",
    ("cli/__init__.py", "_main_of"): "a command of our own, by a name of a table in the same file",
    ("observe/extras.py", "require"): "a library that the user chose, by a name in our own code",
    ("testing/launcher.py", "_check_killed_head"): "a test's own function, through the standard input of its child",
    ("testing/sync_rule.py", "check_sync_rule"): "what the same line has pickled",
    ("acting/serving/server.py", "_construct"): FROM_THE_HEAD,
    ("worker/loop.py", "_construct"): FROM_THE_HEAD,
    ("worker/loop.py", "_call"): FROM_THE_HEAD,
    ("worker/rolling.py", "_reset"): FROM_THE_HEAD,
    ("learners/replay/recorded_episodes.py", "load"): "a file that the user names, without pickles",
    ("worker/zygote.py", "_import_all"): "modules that the head names in the bootstrap",
    ("worker/zygote.py", "_use_threads"): "a library that this process has loaded already",
    ("rollout/nested_launch.py", "import_as_worker"): "the module of an environment or wrapper that the user names",
    ("rollout/sources.py", "_callable"): FROM_THE_HEAD,
}
UNTRUSTED_INPUT = ("head", "buffer", "launch", "wire", "sync")


def names_of(tree: ast.Module) -> dict[str, str]:
    """What names stand for that were imported."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def findings(source: str) -> Iterator[tuple[str, str]]:
    """The function, and what is used in it."""
    tree = ast.parse(source)
    names = names_of(tree)

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.Attribute):
            what = dotted(node, names)
            if is_dangerous(what):
                yield function, what
            if isinstance(node.value, ast.Name):
                return  # the module's name is fine here, and nowhere else
        elif isinstance(node, ast.Name) and is_dangerous(names.get(node.id, node.id)):
            yield function, names.get(node.id, node.id)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield function, "allow_pickle"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and IN_STRINGS.search(node.value):
            yield function, "code in a string"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func, names) in ("importlib.import_module", "ctypes.CDLL")
            and isinstance(node.args[0], ast.Constant)
        ):
            return  # a name in our own code, or None: the libraries that this process has loaded
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(tree, "")


def is_dangerous(what: str) -> bool:
    module, _, name = what.partition(".")
    return what in EXECUTES or (module in PICKLES and name not in WRITES)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(x)",
        "import cloudpickle as c\nc.load(x)",
        "from pickle import loads as l\nl(x)",
        "from pickle import Unpickler",
        "import pickle\ngetattr(pickle, 'loads')(x)",
        "import pickle\nf = pickle",
        "import marshal\nmarshal.loads(x)",
        "import torch\ntorch.load(x)",
        "from torch import load\nload(x)",
        "import numpy as np\nnp.load(x)",
        "np.fromunknown(x, allow_pickle=True)",
        "eval(x)",
        "f = exec",
        "__import__(x)",
        "import yaml\nyaml.load(x)",
        "import importlib\nimportlib.import_module(x)",
        "import ctypes\nctypes.CDLL(x)",
        "run(['python', '-c', 'import cloudpickle; cloudpickle.load(f)'])",
    ],
)
def test_check_finds_code_that_executes_data(source: str) -> None:
    uses = f"{source}\nUnpickler" if "Unpickler" in source else source
    assert list(findings(uses))


@pytest.mark.parametrize(
    "source",
    [
        "import cloudpickle\ncloudpickle.dumps(x)",
        "import json\njson.loads(x)",
        "model.eval()",
        "re.compile(x)",
        "import ctypes\nctypes.CDLL(None, use_errno=True)",
    ],
)
def test_check_ignores_harmless_code(source: str) -> None:
    assert not list(findings(source))


@pytest.mark.slow
def test_nothing_received_is_executed() -> None:
    found = {
        (str(path.relative_to(ROOT)), function): what for path in FILES for function, what in findings(path.read_text())
    }
    assert not {place: what for place, what in found.items() if place not in ALLOWED}
    assert not ALLOWED.keys() - found.keys(), "no longer there"
    assert not [place for place in found if place[0].split("/")[0] in UNTRUSTED_INPUT]


def test_modules_that_read_from_workers_do_not_import_pickle() -> None:
    """`head/members/broadcast.py` writes pickles for workers; nothing else there even imports one."""
    imports = {
        (str(path.relative_to(ROOT)), name)
        for folder in UNTRUSTED_INPUT
        for path in (ROOT / folder).rglob("*.py")
        for name in names_of(ast.parse(path.read_text())).values()
        if name.partition(".")[0] in PICKLES
    }
    assert imports == {("head/members/broadcast.py", "cloudpickle")}
