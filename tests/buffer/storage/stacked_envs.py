"""Environments with stacked frames, and buffers that store them whole and once per frame."""

from __future__ import annotations

from typing import Any

import numpy as np

from farstep import Batch, Buffer
from farstep.batch import FinalObs


class StackedEnvs:
    """Environments whose observations are stacks of random frames `[height, width]`.

    Args:
        rng: Draws frames, ends of episodes and everything irregular.
        num_frames: Frames per stack.
        axis: Axis of the stack: 0 or -1.
        padding: First stack of an episode: "reset" repeats the first frame, "zero" pads with zeros, "random" has any
            frames.
        channels: Channels of a frame on the stacked axis.
        dtype: Dtype of observations.
        nested: Whether observations are a Dict of a stack (`obs.image`) and a number (`obs.speed`).
        jumps: Probability that a stack is unrelated to the one before.
        end: Probability that a step ends its episode.
        has_filler: Whether an episode is followed by a filler row, whose array `valid` is False.
        size: Height and width of a frame.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        num_frames: int = 4,
        axis: int = 0,
        *,
        padding: str = "reset",
        channels: int = 1,
        dtype: str = "uint8",
        nested: bool = False,
        jumps: float = 0.0,
        end: float = 0.15,
        has_filler: bool = False,
        size: tuple[int, int] = (3, 2),
    ) -> None:
        self._rng, self._num_frames, self._axis, self._padding = rng, num_frames, axis, padding
        self._shape = (channels, *size) if axis == 0 else (*size, channels)
        self._dtype, self.nested, self._jumps, self._end, self._has_filler = dtype, nested, jumps, end, has_filler
        self._stacks: dict[int, list[np.ndarray]] = {}
        self._is_filler: dict[int, bool] = {}

    @property
    def array(self) -> str:
        return "obs.image" if self.nested else "obs"

    def _frame(self) -> np.ndarray:
        frame = self._rng.integers(0, 3, self._shape).astype(self._dtype)  # few values: frames may be equal by chance
        return -frame if frame.dtype.kind == "f" and self._rng.random() < 0.5 else frame  # also -0.0

    def _first(self) -> list[np.ndarray]:
        first = self._frame()
        if self._padding == "reset":
            return [first] * self._num_frames
        pad = np.zeros_like if self._padding == "zero" else (lambda _: self._frame())
        return [pad(first) for _ in range(self._num_frames - 1)] + [first]

    def _next(self, stack: list[np.ndarray]) -> list[np.ndarray]:
        if self._rng.random() < self._jumps:
            return [self._frame() for _ in stack]
        return [*stack[1:], self._frame()]

    def _observation(self, stack: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(stack, axis=self._axis)

    def chunk(self, slots: list[int], steps: int) -> Batch:
        """Return the next steps of some slots."""
        rng, shape = self._rng, (steps, len(slots))
        is_new = np.array([slot not in self._stacks for slot in slots])
        obs = np.empty((*shape, *self._observation(self._first()).shape), self._dtype)
        flags = {name: np.zeros(shape, bool) for name in ("terminated", "truncated", "episode_start")}
        valid = np.ones(shape, bool)
        final: list[tuple[int, int, np.ndarray]] = []
        for column, slot in enumerate(slots):
            stack, starts = self._stacks.get(slot), False
            if stack is None:
                stack, starts = self._first(), True
            for t in range(steps):
                obs[t, column], flags["episode_start"][t, column] = self._observation(stack), starts
                starts, stack = False, self._next(stack)
                if self._is_filler.pop(slot, False):
                    valid[t, column], flags["episode_start"][t, column] = False, True
                    stack, starts = self._first(), True
                elif rng.random() < self._end:
                    flags["terminated" if rng.random() < 0.5 else "truncated"][t, column] = True
                    final.append((t, column, self._observation(stack)))
                    self._is_filler[slot] = self._has_filler
                    stack, starts = self._first() if not self._has_filler else stack, not self._has_filler
            self._stacks[slot] = stack
        final.sort(key=lambda end: end[:2])
        rows, columns = (np.array([end[i] for end in final], np.int64) for i in (0, 1))
        ends = np.array([end[2] for end in final], self._dtype).reshape(len(final), *obs.shape[2:])
        last = np.stack([self._observation(self._stacks[slot]) for slot in slots])
        arrays = {"reward": rng.normal(size=shape), **flags}
        if self._has_filler:
            arrays["valid"] = valid
        arrays[self.array] = obs
        structure: Any = "obs"
        after: Any = last
        ended: Any = ends
        if self.nested:
            structure = {"image": "obs.image", "speed": "obs.speed"}
            arrays["obs.speed"] = rng.normal(size=shape)
            after = {"image": last, "speed": rng.normal(size=len(slots))}
            ended = {"image": ends, "speed": rng.normal(size=len(final))}
        episodes = {"slot": np.array(slots)[columns], "return": 0.0 * rows, "length": 0 * rows}
        return Batch(
            arrays,
            {"obs": structure},
            after,
            FinalObs(rows, columns, ended),
            episodes,
            np.array(slots),
            ~is_new,
        )


def assert_equal_samples(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare flat and nested arrays of two batches, bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_equal_samples(found[name], value)
        else:
            assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
            assert found[name].tobytes() == value.tobytes(), name


def assert_equal_contents(buffer: Buffer, whole: Buffer) -> None:
    """Compare all items of two buffers."""
    assert len(buffer) == len(whole) and buffer.removed == whole.removed
    if len(whole):
        (found, is_found), (expected, is_expected) = (each.read(each.keys()) for each in (buffer, whole))
        assert is_found.all() and is_expected.all()
        assert_equal_samples(found, expected)
