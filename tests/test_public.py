"""The public names, and the modules that importing them loads."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import farstep
from farstep import observe
from farstep.config.base import Options
from farstep.config.field_docs import field_docs

ERRORS = {
    "AgentError",
    "BufferTimeout",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "FarstepError",
    "LaunchError",
    "PublishTimeout",
    "RemoteEnvError",
    "ResourceError",
    "WorkerDied",
    "WorkerError",
    "WorkerStuck",
}
"""Errors that user programs catch."""


def test_errors_that_programs_catch_are_public() -> None:
    assert set(farstep.__all__) >= ERRORS
    assert all(issubclass(getattr(farstep, name), farstep.FarstepError) for name in ERRORS)


def test_there_are_few_public_names() -> None:
    others = [name for name in farstep.__all__ if name not in ERRORS]
    assert 0 < len(others) <= 26
    assert len(set(farstep.__all__)) == len(farstep.__all__)
    assert set(farstep.__all__) <= set(dir(farstep))


@pytest.mark.parametrize("name", farstep.__all__)
def test_each_public_name_exists_and_has_a_docstring(name: str) -> None:
    thing = getattr(farstep, name)
    assert thing.__name__ == name
    assert (thing.__doc__ or "").strip()


@pytest.mark.parametrize("folder", ["buffer", "elastic", "learners", "sync", "testing"])
def test_subpackages_are_imported_on_first_use(folder: str) -> None:
    code = (
        f"import farstep, sys\nassert 'farstep.{folder}' not in sys.modules\nprint(farstep.{folder}.__all__)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout and folder in dir(farstep)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="ClusterEnvv"):
        farstep.ClusterEnvv
    with pytest.raises(AttributeError, match="has no attribute 'check_launchers'"):
        farstep.testing.check_launchers


def test_environments_for_tests_do_not_import_the_head() -> None:
    """Workers import them, so that each of hundreds of workers in a test suite would import the head, too."""
    code = "import sys\nfrom farstep.testing import CountingEnv, TableAgent\nprint('farstep.head' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_importing_farstep_starts_nothing() -> None:
    """Threads must be set before NumPy or torch is imported, so the package itself imports neither."""
    assert not loaded_after("import farstep") & {"numpy", "torch", "jax", "gymnasium", "zmq"}


def test_workers_and_node_daemons_do_not_import_asyncio() -> None:
    """It takes a tenth of the CPU time with which they start."""
    assert "asyncio" not in loaded_after("import farstep.launch.daemon.node_daemon, farstep.worker.loop")


@pytest.mark.parametrize("name", farstep.learners.__all__)
def test_learners_have_their_public_names(name: str) -> None:
    assert (getattr(farstep.learners, name).__doc__ or "").strip()
    assert name in dir(farstep.learners)


def test_an_unknown_learner_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="PPOO"):
        farstep.learners.PPOO


MODULES = [
    *(farstep, farstep.buffer, farstep.elastic, farstep.learners, farstep.learners.losses, farstep.learners.returns),
    *(observe, farstep.sync, farstep.testing),
]
"""The modules that users import from."""


def members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public classes and functions of a module."""
    own = [name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
    for name in getattr(module, "__all__", own):
        each = getattr(module, name)
        if not name.startswith("_") and (inspect.isfunction(each) or isinstance(each, type)):
            yield f"{module.__name__}.{name}", each


def described() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """The public functions, methods and constructors of farstep, and their docstrings."""
    for path, each in (found for module in MODULES for found in members(module)):
        if not isinstance(each, type):
            yield path, each, each.__doc__ or ""
            continue
        for name, function in inspect.getmembers(each, inspect.isroutine):
            if not name.startswith("_") and _is_own(function):
                yield f"{path}.{name}", function, inspect.getdoc(function) or ""
        if _is_own(vars(each).get("__init__")) and not dataclasses.is_dataclass(each):
            yield path, vars(each)["__init__"], (each.__doc__ or "").replace("Attributes:", "Args:")


def _is_own(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("farstep.")


def missing_in(docstring: str, function: Callable[..., Any]) -> list[str]:
    """The sections that a docstring lacks."""
    signature = inspect.signature(function)
    has_parameters = bool([name for name in signature.parameters if name != "self"])
    returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    is_there = {
        "a docstring": bool(docstring),
        "Args:": "Args:" in docstring or not has_parameters,
        "Returns: or Yields:": "Returns:" in docstring or "Yields:" in docstring or not returns,
    }
    return [section for section, found in is_there.items() if not found]


def test_public_functions_describe_their_arguments_and_results() -> None:
    missing = {path: missing_in(docstring, function) for path, function, docstring in described()}
    assert missing.keys() >= {"farstep.ClusterEnv", "farstep.Buffer.sample", "farstep.learners.returns.gae"}
    assert {path: sections for path, sections in missing.items() if sections} == {}


PUBLIC = [getattr(farstep, name) for name in farstep.__all__]
CONFIGS = [
    *(kind for kind in PUBLIC if isinstance(kind, type) and issubclass(kind, Options)),
    *(getattr(farstep.learners, name) for name in farstep.learners.__all__ if name.endswith("Config")),
]


def test_all_configurations_are_found() -> None:
    assert {farstep.EnvConfig, farstep.KubernetesConfig, farstep.Stagger, farstep.learners.PPOConfig} <= {*CONFIGS}


@pytest.mark.parametrize("kind", CONFIGS)
def test_help_shows_the_text_of_every_option(kind: type) -> None:
    shown = " ".join(pydoc.plain(pydoc.render_doc(kind)).replace("|", " ").split())
    docs = field_docs(kind)
    for field in dataclasses.fields(kind):
        assert docs.get(field.name), f"{kind.__name__}.{field.name} has no docstring"
        assert " ".join(docs[field.name].replace("|", " ").split()) in shown


def test_help_shows_the_fields_of_other_dataclasses() -> None:
    kinds: set[type] = {
        each for module in MODULES for _, each in members(module) if hasattr(each, "__dataclass_fields__")
    }
    assert {farstep.buffer.SampleInfo, farstep.learners.Limits, farstep.elastic.Signals} < kinds
    for kind in kinds - {*CONFIGS}:
        shown = " ".join((kind.__doc__ or "").split())
        assert [name for name, text in field_docs(kind).items() if text not in shown and f"{name}:" not in shown] == []


def test_help_names_mappings_where_they_are_accepted() -> None:
    text = farstep.EnvConfig.__doc__ or ""
    assert "weights (WeightsConfig | Mapping," in text and "OrMapping" not in text


def test_help_works_in_optimized_bytecode() -> None:
    code = "import farstep\nprint(farstep.LocalConfig.__doc__)"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "nodes (int, default 1): Number of nodes" in done.stdout


@pytest.mark.slow
def test_help_works_without_source(tmp_path: Path) -> None:
    """In a zip file, and where only bytecode is installed."""
    package = Path(farstep.__file__).parent
    with (
        zipfile.ZipFile(tmp_path / "source.zip", "w") as source,
        zipfile.PyZipFile(str(tmp_path / "bytecode.zip"), "w") as bytecode,
    ):
        for path in (*package.glob("*.py"), *(package / "config").glob("*.py")):
            source.write(path, path.relative_to(package.parent))
            bytecode.writepy(str(path), str(path.parent.relative_to(package.parent)))
    for name, text in (("source.zip", ": Number of nodes"), ("bytecode.zip", "nodes (int, default 1)")):
        code = f"import sys\nsys.path.insert(0, {str(tmp_path / name)!r})\nimport farstep\n"
        code += "print(farstep.__file__, farstep.LocalConfig.__doc__)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert name in done.stdout and text in done.stdout


@pytest.mark.slow
def test_torch_is_imported_with_the_first_learner_and_not_before() -> None:
    assert "torch" not in loaded_after("import farstep.learners\nfarstep.learners.returns.gae")
    assert "torch" in loaded_after("import farstep\nfarstep.learners.PPOConfig")


@pytest.mark.slow
def test_no_public_name_needs_torch_or_jax() -> None:
    assert not loaded_after("import farstep\nfor name in farstep.__all__: getattr(farstep, name)") & {"torch", "jax"}
