"""Fixtures and options of all tests; the leak check comes from `farstep.testing.leaks`."""

import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator

import cloudpickle
import pytest

import tests
from farstep.errors import LaunchError
from farstep.launch.daemon.criu import working_criu
from farstep.launch.daemon.process import ProcessStarter
from farstep.testing.zygote import shared_zygote
from tests.engines.guarded import EngineMissing
from tests.line_coverage import remove_leftovers

pytest_plugins = ["tests.longest_first"]
remove_leftovers()

# A shell's `&` and nohup have Ctrl-C ignored, here and in all that tests start; some of them are about Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Workers get classes of test modules by value: importing the module would import pytest and all that a test needs.
cloudpickle.register_pickle_by_value(tests)

# Tests start hundreds of processes; without bytecode files each would compile farstep again (0.3 of 0.7 s CPU time).
# pytest keeps test modules with rewritten assertions there, which take half the CPU time of collecting tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# With several threads, small matrices wait for each other: the examples of a page took 2.4 times the CPU time.
os.environ["OMP_NUM_THREADS"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:  # what another process makes meanwhile is not left behind by a test of this one
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="t-")


def pytest_sessionfinish() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory):
    """The key that tags runs is one of the tests' own, also in processes that they start."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True, scope="session")
def zygote(own_state):
    """Workers of this process are forks of one process, which saves the imports of each."""
    with shared_zygote([]):
        yield


@pytest.fixture
def descriptors_above_1023() -> Iterator[None]:
    """New descriptors of this process have numbers above 1023, which `select.select` refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < 1023:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="session")
def criu() -> str:
    """The path of criu; tests are skipped where it does not work."""
    try:
        working = working_criu()
    except LaunchError as error:
        pytest.skip(str(error))
    working.close()
    return working.program


@pytest.fixture(scope="session")
def zygote_with_torch(zygote):
    """Another such process, which has imported torch."""
    without = ProcessStarter.shared
    with shared_zygote(["farstep.learners.networks.agent"]):
        with_torch, ProcessStarter.shared = ProcessStarter.shared, without
        yield with_torch


@pytest.fixture
def torch_in_workers(zygote_with_torch, monkeypatch):
    """Workers have imported torch when they start, as where a learner has: saves each of them 2 s of CPU time."""
    monkeypatch.setattr(ProcessStarter, "shared", zygote_with_torch)


@pytest.fixture(autouse=True, scope="session")
def no_preloading():
    """Workers import torch only for an agent that needs it, not because an earlier test imported it here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farstep.head.members.handshake.PRELOADED", ())
        yield


def skipping() -> Generator[None, object, object]:
    """Tests of SLURM and other engines are skipped where those are not installed, but for FARSTEP_ENGINES=required."""
    try:
        return (yield)
    except EngineMissing as error:
        if os.environ.get("FARSTEP_ENGINES") == "required":
            raise
        return pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from skipping())
