"""Packages that are not installed, versions that are not registered, environments of other libraries: one line each."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.cli import main
from farstep.errors import EXTRAS

BLOCKER = """
import os
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == os.environ["BLOCKED"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""
HERE = ["--launcher", "in-process"]
VIDEO = ["--capture-video", "--eval-every", "1000", "--total-steps", "64"]


def block(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Make the import of a module fail, also in modules that were imported with it before."""
    for name in list(sys.modules):
        if name.partition(".")[0] == module or name.startswith("gymnasium.envs.box2d"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)


def only_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error message of a command that fails."""
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("farstep: ") and error.count("\n") == 1, error
    return error


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run."""
    folder = tmp_path_factory.mktemp("runs")
    options = ["--total-steps", "64", "--num-envs", "2", "--num-steps", "32", "--name", "cart", "--folder"]
    assert main(["train", "ppo", "--env", "CartPole-v1", *HERE, *options, str(folder)]) == 0
    return folder / "cart"


def test_train_names_the_extra_of_a_missing_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, "Box2D")
    error = only_line(capsys, "train", "ppo", "--env", "LunarLander-v3", *HERE)
    assert "'LunarLander-v3' needs Box2D, which is not installed. Install it: pip install 'farstep[envs]'" in error


@pytest.mark.slow
def test_workers_name_the_extra_of_a_missing_package(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    script = "import farstep; farstep.make_vec('LunarLander-v3', config={'workers_per_node': 1})"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "BLOCKED": "Box2D"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "RemoteConfigError: 'LunarLander-v3' needs Box2D" in done.stderr and "'farstep[envs]'" in done.stderr


def test_atari_names_its_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    block(monkeypatch, "ale_py")
    monkeypatch.setattr("gymnasium.registry", {})
    assert "Install it: pip install 'farstep[envs]'" in only_line(capsys, "train", "ppo", "--env", "ALE/Pong-v5", *HERE)


def test_watch_names_the_extra_of_a_missing_renderer(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, "pygame")
    error = only_line(capsys, "watch", str(trained))
    assert "'CartPole-v1' needs pygame, which is not installed. Install it: pip install 'farstep[envs]'" in error
    assert not list((trained / "videos").glob("*"))


def test_train_with_videos_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, "pygame")
    monkeypatch.chdir(tmp_path)
    assert "pip install 'farstep[envs]'" in only_line(capsys, "train", "ppo", "--env", "CartPole-v1", *HERE, *VIDEO)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "module", "extra"), [("watch", "imageio_ffmpeg", "video"), ("plot", "matplotlib", "plot")]
)
def test_watch_and_plot_name_their_extras(
    command: str,
    module: str,
    extra: str,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block(monkeypatch, module)
    assert f"pip install 'farstep[{extra}]'" in only_line(capsys, command, str(trained))


def test_extras_and_readme_agree_with_the_project() -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)
    readme = (root / "README.md").read_text()
    for command, needed in (("farstep watch", "extras video and envs"), ("farstep plot", "extra plot")):
        assert any(command in line and needed in line for line in readme.splitlines())


@pytest.mark.parametrize(("name", "newest"), [("Pendulum-v0", "Pendulum-v1"), ("CartPole-v9", "CartPole-v1")])
def test_version_that_is_not_registered_names_the_newest(
    name: str, newest: str, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    error = only_line(capsys, "train", "ppo", "--env", name, *HERE)
    assert f"{name!r} is not registered; use the newest version, {newest!r}" in error
    assert not [warning for warning in recwarn if "out of date" in str(warning.message)]


class ParallelGame:
    """Has the shape of a PettingZoo environment."""

    possible_agents = ("red", "blue")


@pytest.mark.parametrize("kind", ["factory", "vector"])
def test_pettingzoo_environment_is_explained(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:make_game"
    error = only_line(capsys, "train", "ppo", "--env", name, "--env-type", kind, *HERE)
    assert "a ParallelGame, an environment of PettingZoo for several agents (2)" in error
    assert "one agent's view" in error


def make_game(num_envs: int = 1) -> ParallelGame:
    return ParallelGame()


def test_class_of_pettingzoo_is_recognized_without_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    import farstep

    base: Any = type("AECEnv", (), {"__module__": "pettingzoo.utils.env"})
    monkeypatch.setitem(sys.modules, "pettingzoo", types.ModuleType("pettingzoo"))
    game = type("Chess", (base,), {"__module__": __name__})
    with pytest.raises(farstep.ConfigError, match="a Chess, an environment of PettingZoo"):
        farstep.make_vec(lambda: game(), 1, farstep.InProcessConfig())


@pytest.mark.parametrize(("option", "module"), [(["--tensorboard"], "tensorboard"), (["--wandb", "project"], "wandb")])
def test_run_folder_is_not_created_if_a_logger_is_missing(
    option: list[str], module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, module)
    monkeypatch.chdir(tmp_path)
    assert f"Install it: pip install {module}" in only_line(
        capsys, "train", "ppo", "--env", "CartPole-v1", *HERE, *option
    )
    assert not list(tmp_path.iterdir())


def test_a_learner_without_torch_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    learners = farstep.learners

    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ModuleNotFoundError) as raised:
        learners.PPO
    assert raised.value.__notes__ == ["farstep.learners.PPO needs torch; install it with: pip install 'farstep[torch]'"]
