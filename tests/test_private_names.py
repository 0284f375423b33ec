"""Tests use public names of farstep only: an underscored name may change with every refactoring of its module.

Ruff (SLF001) finds private attributes of objects, but neither imports, nor names in strings, such as those that are
patched and those of programs that tests start.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRIVATE = re.compile(r"_(?!_)\w+")
OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
BY_STRING = {"delattr", "getattr", "hasattr", "object", "setattr"}
"""Functions whose arguments are an object and the name of an attribute; also of `monkeypatch` and `mock.patch`."""
NOT_IMPORTED = {"os": "os", "super": "builtins", "torch": "torch"}
"""Packages of names that files use without an import statement: in strings, or after `pytest.importorskip`."""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """For each imported name of a file, the package that it comes from."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                module = alias.name if isinstance(node, ast.Import) else node.module or ""
                names[(alias.asname or alias.name).partition(".")[0]] = module.partition(".")[0]
    return names


def may_be_farsteps(owner: ast.expr, packages: Mapping[str, str]) -> bool:
    """Whether an attribute of `owner` may belong to farstep, not to the test's own class or to another package."""
    if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
        return False
    while isinstance(owner, (ast.Attribute, ast.Call, ast.Subscript)):
        owner = owner.func if isinstance(owner, ast.Call) else owner.value
    return not isinstance(owner, ast.Name) or packages.get(owner.id, "farstep") == "farstep"


def private_imports(node: ast.Import | ast.ImportFrom) -> list[str]:
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    names = [f"{prefix}{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith("farstep.") and any(map(PRIVATE.fullmatch, name.split(".")))]


def text_of(node: ast.Constant | ast.JoinedStr) -> str:
    """A string, with `x` for each value that an f-string inserts."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts)


def private_names(source: str, outer: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """The lines of some code, and the private names that may be farstep's; also of code in its strings.

    Args:
        source: The code.
        outer: Packages of names that the code uses without importing them.
    """
    tree = ast.parse(source)
    packages = {**outer, **imported_names(tree)}

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from ((node.lineno, name) for name in private_imports(node))
            case ast.Attribute(value=owner, attr=name) if PRIVATE.fullmatch(name) and name not in OF_NAMED_TUPLES:
                if may_be_farsteps(owner, packages):
                    yield node.lineno, ast.unparse(node)
            case ast.Call(
                func=ast.Name(id=function) | ast.Attribute(attr=function), args=[owner, ast.Constant(str(name)), *_]
            ) if function in BY_STRING and PRIVATE.fullmatch(name):
                if may_be_farsteps(owner, packages):
                    yield node.lineno, f"{ast.unparse(owner)}.{name}"
            case ast.Constant(str()) | ast.JoinedStr():
                yield from in_string(node)
                return
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    def in_string(node: ast.Constant | ast.JoinedStr) -> Iterator[tuple[int, str]]:
        text = textwrap.dedent(text_of(node))
        if re.search(r"\b_[A-Za-z]", text):
            try:
                found = list(private_names(text, packages))
            except (SyntaxError, ValueError):  # no code
                return
            yield from ((node.lineno + line - 1, name) for line, name in found)

    yield from visit(tree)


def found_in(source: str) -> list[tuple[int, str]]:
    return list(private_names(source, NOT_IMPORTED))


@pytest.mark.parametrize(
    "source",
    [
        "from farstep.resources import usable_cpus, _quota_of",
        "from farstep._hidden import name",
        "import farstep._hidden",
        "from farstep import resources\nresources._quota_of(x)",
        "import farstep.resources\nfarstep.resources._CGROUPS",
        "import farstep.resources as machine\nmachine._CGROUPS.name",
        "from farstep.head.server import Server\nServer._wait(x)",
        "env._launched()",
        "make().workers[0]._pid",
        "monkeypatch.setattr(module, '_CHECK_S', 1.0)",
        "monkeypatch.setattr(world.worker, '_pid', 1)",
        "monkeypatch.setattr('farstep.launch.engines.slurm._STAY_S', 1.0)",
        "mock.patch('farstep.launch.engines.slurm._STAY_S', 1.0)",
        "mock.patch.object(Server, '_wait')",
        "getattr(env, '_launched')()",
        "code = '''\n    import farstep\n    env._launched()\n'''",
        "code = f'from farstep.resources import _quota_of\\n{more}'",
    ],
)
def test_check_finds_private_names(source: str) -> None:
    assert len(found_in(source)) == 1


def test_check_names_the_line() -> None:
    assert found_in('a = 1\ncode = """\nimport farstep\nfarstep._hidden()\n"""') == [(4, "farstep._hidden")]


@pytest.mark.parametrize(
    "source",
    [
        "from farstep.resources import usable_cpus",
        "from __future__ import annotations\nenv.__class__.__name__",
        "self._calls += 1",
        "super()._start()",
        "import torch\ntorch._assert_async(x)",
        "import zmq\nmonkeypatch.setattr(zmq.backend, '_hidden', 1)",
        "os._exit(0)",
        "code = 'os._exit(0)'",
        "rollout._replace(rewards=x)",
        "def _helper(): pass\n_helper()",
        "info['_final_obs']",
        "'the call _exit of os._'",
    ],
)
def test_check_ignores_other_names(source: str) -> None:
    assert not found_in(source)


@pytest.mark.slow
def test_tests_use_public_names_only() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert len(files) > 300
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(files)
        for line, name in found_in(path.read_text(encoding="utf-8"))
    ]
    assert not found, "private names of farstep; make them public or test through a public name:\n" + "\n".join(found)
