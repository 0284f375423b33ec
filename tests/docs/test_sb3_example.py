"""The adapter of examples/sb3_unmodified.py behaves like the vector environments of Stable-Baselines3."""

from __future__ import annotations

import importlib
import sys
import types
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest

import farstep
from farstep.observe.video import write_video

EXAMPLES = Path(__file__).parents[2] / "examples"
IN_PROCESS = farstep.InProcessConfig(workers_per_node=2)


@pytest.fixture(scope="module")
def example() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module("sb3_unmodified")


class Informed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Says in its infos how far an episode is, and where a new one came from."""

    def reset(self, **options: Any) -> Any:
        self.count = 0
        obs, _ = self.env.reset(**options)
        return obs, {"came_from": str(options.get("options"))}

    def step(self, action: Any) -> Any:
        self.count += 1
        info = {"count": self.count, "nested": {"half": self.count / 2}} | ({"odd": True} if self.count % 2 else {})
        return *self.env.step(action)[:4], info


def informed() -> Any:
    return Informed(gymnasium.make("CartPole-v1", max_episode_steps=12))


def test_infos_are_those_of_stable_baselines(example: Any) -> None:
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

    envs = farstep.make_vec([informed] * 3, config=IN_PROCESS, autoreset_mode="SAME_STEP")
    with closing(VecMonitor(example.Adapter(envs))) as ours, closing(VecMonitor(DummyVecEnv([informed] * 3))) as theirs:
        for vector in (ours, theirs):
            vector.seed(4)
            vector.set_options({"level": 2})
            vector.reset()
        assert ours.venv.reset_infos == theirs.venv.reset_infos == [{"came_from": "{'level': 2}"}] * 3
        rng, seen = np.random.default_rng(1), set()
        for _ in range(60):
            actions = rng.integers(0, 2, 3)
            infos: Any
            expected: Any
            (*mine, infos), (*other, expected) = ours.step(actions), theirs.step(actions)
            for a, b in zip(mine, other, strict=True):
                np.testing.assert_allclose(cast(Any, a), cast(Any, b))
            for a, b in zip(infos, expected, strict=True):
                assert a.keys() == b.keys()
                np.testing.assert_array_equal(a.pop("terminal_observation", 0), b.pop("terminal_observation", 0))
                for info in (a, b):
                    info.get("episode", {}).pop("t", None)
                assert a == b
                seen |= {*a, "cut"} if a["TimeLimit.truncated"] else set(a)
            assert ours.venv.reset_infos == theirs.venv.reset_infos
        assert {"episode", "cut", "nested", "odd"} <= seen


class FakeClip:
    """In place of MoviePy's, which Stable-Baselines3 writes its videos with: it may not be installed."""

    def __init__(self, frames: list[Any], fps: float) -> None:
        self._frames, self._fps = frames, fps

    def write_videofile(self, path: str) -> None:
        write_video(path, self._frames, self._fps)


def test_stable_baselines_records_videos(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stable_baselines3.common.vec_env import VecVideoRecorder

    names = ["moviepy", "moviepy.video", "moviepy.video.io", "moviepy.video.io.ImageSequenceClip"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "ImageSequenceClip", FakeClip, raising=False)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    envs = farstep.make_vec("CartPole-v1", 2, IN_PROCESS, "SAME_STEP", env_kwargs={"render_mode": "rgb_array"})
    recorder = VecVideoRecorder(example.Adapter(envs), str(tmp_path), lambda step: step == 0, video_length=5)
    with closing(recorder):
        recorder.reset()
        assert recorder.frames_per_sec == envs.metadata["render_fps"]
        for _ in range(6):
            recorder.step(np.zeros(2, np.int64))
        assert [np.shape(cast(Any, image)) for image in recorder.get_images()] == [(400, 600, 3)] * 2
    assert [path.suffix for path in tmp_path.iterdir()] == [".mp4"]
    assert next(tmp_path.iterdir()).stat().st_size > 1000
