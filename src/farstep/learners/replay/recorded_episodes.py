"""Complete episodes in a file: recorded from any policy, and replayed by a learner before its first rollouts."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gymnasium.spaces import Box

from farstep.batch import EPISODE_KEYS, Batch, FinalObs, is_final
from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.replay import Buffer
from farstep.cluster_env import ClusterEnv
from farstep.core import Agent, Array
from farstep.errors import ConfigError, RunError, counted
from farstep.learners.loop.evaluation import MAX_STEPS, episode_quotas
from farstep.learners.networks.encoders import Space
from farstep.observe.files import as_run_error, replace_file
from farstep.schema import ArraySpec, Schema, leaf_spaces, leaves, nest

_FORMAT = 1
_ROWS, _FINAL = "rows/", "final/"
"""Prefixes of the names of arrays in a file."""
_DERIVED = {"valid", "version", "episode_start"}
"""Arrays of a batch that the file does not need, because every row is one of a complete episode."""
_STEPS = 64
_ADVICE = "Record episodes with 'farstep eval RUN --sample --record episodes.npz', and pass --warmup episodes.npz."


@dataclass(frozen=True)
class RecordedEpisodes:
    """Complete episodes, one after the other."""

    rows: Mapping[str, Array]
    """Arrays `[rows, ...]` by name; nested ones by path, e.g. `obs.camera`. Every row is a valid step."""
    final_obs: Mapping[str, Array]
    """Observations after the last step of each episode, `[episodes, ...]`, with the names of observations."""
    lengths: Array
    """Number of rows of each episode."""

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.lengths)

    @property
    def returns(self) -> Array:
        """Sum of rewards of each episode."""
        starts = np.cumsum(self.lengths) - self.lengths
        return np.add.reduceat(self.rows["reward"].astype(np.float64), starts)

    def save(self, path: Path) -> None:
        """Write the episodes to a file in NumPy's `.npz` format.

        Args:
            path: The file; it is replaced if it exists.

        Raises:
            RunError: The file cannot be written.
        """
        content = io.BytesIO()
        arrays = {f"{_ROWS}{name}": array for name, array in self.rows.items()}
        arrays |= {f"{_FINAL}{name}": array for name, array in self.final_obs.items()}
        np.savez_compressed(content, format=np.array(_FORMAT), lengths=self.lengths, **arrays)  # type: ignore[arg-type]
        with as_run_error(path):
            replace_file(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> RecordedEpisodes:
        """Read a file that `save` wrote. Nothing in it is executed.

        Args:
            path: The file.

        Returns:
            The episodes.

        Raises:
            ConfigError: The file cannot be read, or it does not contain complete episodes.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except OSError as error:
            reason = error.strerror or "it is not a recording"
            raise ConfigError(f"{path} cannot be read: {reason}. {_ADVICE}") from None
        except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
            raise ConfigError(f"{path} is damaged, or is not a file of recorded episodes. {_ADVICE}") from None
        if "format" not in arrays or "lengths" not in arrays or arrays["format"].tolist() != _FORMAT:
            raise ConfigError(f"{path} has no recorded episodes of format {_FORMAT}. {_ADVICE}")
        found = cls(
            {name.removeprefix(_ROWS): array for name, array in arrays.items() if name.startswith(_ROWS)},
            {name.removeprefix(_FINAL): array for name, array in arrays.items() if name.startswith(_FINAL)},
            arrays["lengths"],
        )
        found._check_episodes(path)
        return found

    def _check_episodes(self, path: Path) -> None:
        """Raise `ConfigError` unless lengths, rows and the marks of ends agree."""
        lengths = self.lengths
        are_counts = lengths.ndim == 1 and lengths.dtype.kind in "iu" and len(lengths) > 0 and (lengths > 0).all()
        if not are_counts:
            raise ConfigError(f"{path}: lengths are {lengths!r}; expected one positive number per episode.")
        total = int(lengths.sum())
        for name in {"terminated", "truncated", "reward"} - self.rows.keys():
            raise ConfigError(f"{path} has no array {name!r}; every recorded step needs one.")
        sizes = [(name, array, total) for name, array in self.rows.items()]
        sizes += [(f"final {name}", array, len(self)) for name, array in self.final_obs.items()]
        for name, array, count in sizes:
            if array.ndim == 0 or len(array) != count:
                raise ConfigError(f"{path}: {name!r} has shape {list(array.shape)}; expected {count:,} rows.")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ConfigError(f"{path}: {name!r} has numbers that are not finite.")
        ends = np.zeros(total, bool)
        ends[np.cumsum(lengths) - 1] = True
        marked = (self.rows["terminated"] != 0) | (self.rows["truncated"] != 0)
        if marked.shape != ends.shape or (wrong := np.flatnonzero(marked != ends)).size:
            where = f"row {wrong[0]:,}" if marked.shape == ends.shape else "its shape"
            raise ConfigError(
                f"{path}: 'terminated' and 'truncated' do not mark exactly the last row of every episode ({where})."
            )

    # ---- replaying ----

    def check_room(self, path: Path, capacity: int) -> None:
        """Raise `ConfigError` if a buffer of `capacity` rows is too small for these episodes."""
        if (rows := int(self.lengths.sum())) > capacity:
            raise ConfigError(
                f"{path} has {rows:,} steps, but the replay buffer holds {capacity:,}. Raise --buffer-size, or record "
                "fewer episodes."
            )

    def check_names(self, path: Path, names: Collection[str]) -> None:
        """Raise `ConfigError` if one of the arrays that a learner needs is missing."""
        recorded = {*self.rows, *(name.split(".")[0] for name in self.rows)}
        for name in names:
            if name not in recorded and name not in _DERIVED and name != "next_obs":
                raise self._missing(path, name)

    def check(self, path: Path, schema: Schema, names: Collection[str], spaces: tuple[Space, Space]) -> None:
        """Check that a learner can replay these episodes.

        Args:
            path: Their file, for error messages.
            schema: The arrays of the learner's buffer, or those that are known before it is allocated.
            names: The arrays of a batch that the learner needs.
            spaces: Observation space and action space of the environments.

        Raises:
            ConfigError: An array is missing or has another shape, or a value is outside of its space.
        """
        self.check_names(path, names)
        for name, spec in schema.items():
            if (name in names or name.split(".")[0] in names) and name not in _DERIVED:
                self._check_array(path, name, spec)
        for name in (name for name in schema if name.split(".")[0] == "obs"):
            final = self.final_obs.get(name)
            if final is None or final.shape[1:] != self.rows[name].shape[1:] or final.dtype != self.rows[name].dtype:
                raise ConfigError(f"{path}: the final observations do not match {name!r}.")
        for key, space in zip(("obs", "action"), spaces, strict=True):
            for name, leaf in leaf_spaces(space, key).items():
                _check_values(path, name, self.rows[name], leaf)
                if key == "obs":
                    _check_values(path, name, self.final_obs[name], leaf)

    def _missing(self, path: Path, name: str) -> ConfigError:
        return ConfigError(
            f"{path} has no array {name!r}, which this learner needs; it has {', '.join(sorted(self.rows))}. "
            "Record it with an agent of the same kind, in the same environment."
        )

    def _check_array(self, path: Path, name: str, spec: ArraySpec) -> None:
        array = self.rows.get(name)
        if array is None:
            raise self._missing(path, name)
        if array.shape[1:] != spec.shape or not np.can_cast(array.dtype, np.dtype(spec.dtype), "same_kind"):
            raise ConfigError(
                f"{path}: {name!r} is {array.dtype}{list(array.shape[1:])} per step, but the environments and the "
                f"agent of this run have {spec}."
            )

    def insert_into(self, buffer: Buffer) -> None:
        """Insert the episodes into a buffer, each into the column with the fewest rows.

        Call `check` first. The limiter must allow all of them. Arrays that only this buffer has are 0.
        """
        filled = np.zeros(internals_of(buffer).store.num_slots, np.int64)
        for index, (end, length) in enumerate(zip(np.cumsum(self.lengths), self.lengths, strict=True)):
            column = int(filled.argmin())
            filled[column] += length
            buffer.insert(self._batch(buffer, index, slice(int(end - length), int(end)), column))

    def _batch(self, buffer: Buffer, index: int, rows: slice, column: int) -> Batch:
        length, structures = rows.stop - rows.start, internals_of(buffer).structures
        arrays = {}
        for name, spec in buffer.schema.items():
            array = np.zeros((length, 1, *spec.shape), spec.dtype)
            if name in self.rows:
                array[:, 0] = self.rows[name][rows]
            arrays[name] = array
        arrays["valid"][:] = True
        if "episode_start" in arrays:
            arrays["episode_start"][0] = True
        after = nest(structures["obs"], {name: array[index : index + 1] for name, array in self.final_obs.items()})
        nothing: Array = np.zeros(0)
        return Batch(
            arrays,
            structures,
            after,
            FinalObs(np.array([length - 1]), np.array([0]), after),
            dict.fromkeys(EPISODE_KEYS, nothing),
            np.array([column]),
            np.array([False]),
        )


def check_replaceable(path: Path) -> None:
    """Raise `ConfigError` if `path` exists and is not a recording of farstep, so that no other file is overwritten."""
    if not path.exists():
        return
    try:
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
    except (OSError, zipfile.BadZipFile):
        names = []
    if not {"format.npy", "lengths.npy"} <= set(names):
        raise ConfigError(
            f"{path} exists and is not a recording of farstep, so it is not replaced. Choose another file, "
            "e.g. --record episodes.npz."
        )


def _check_values(path: Path, name: str, values: Array, space: Space) -> None:
    """Raise `ConfigError` if a value is not in its space. Boxes are not checked: many environments violate them."""
    if isinstance(space, Box):
        return
    for value in values:
        if not space.contains(value):
            raise ConfigError(f"{path}: {name!r} has the value {value}, which is not in {space}.")


class EpisodeRecorder:
    """Cuts batches into complete episodes, and keeps the first ones of every slot.

    Args:
        quotas: Number of episodes to keep of each slot.
    """

    def __init__(self, quotas: Collection[int]) -> None:
        self._quotas = list(quotas)
        self._begun: list[list[dict[str, Array]] | None] = [None for _ in quotas]
        """Rows of the current episode of each slot; None: its start is unknown."""
        self._rows: list[list[dict[str, Array]]] = [[] for _ in quotas]
        """Rows of the complete episodes of each slot."""
        self._lengths: list[list[int]] = [[] for _ in quotas]
        self._final: list[list[dict[str, Array]]] = [[] for _ in quotas]

    @property
    def count(self) -> int:
        """Number of complete episodes."""
        return sum(map(len, self._lengths))

    def add(self, batch: Batch) -> None:
        """Add the next rows of all slots."""
        names = [name for name in batch.arrays if not is_final(name) and name not in _DERIVED]
        finals = dict(leaves(batch.structures["obs"], batch.final_obs.obs)) if len(batch.final_obs) else {}
        at_end = {
            (int(row), int(column)): {name: array[k] for name, array in finals.items()}
            for k, (row, column) in enumerate(zip(batch.final_obs.row, batch.final_obs.slot, strict=True))
        }
        for column, slot in enumerate(batch.slots.tolist()):
            if not batch.continues[column]:
                self._begun[slot] = None
            for row in np.flatnonzero(batch["valid"][:, column]).tolist():
                if batch["episode_start"][row, column]:
                    self._begun[slot] = []
                if (begun := self._begun[slot]) is None or len(self._lengths[slot]) == self._quotas[slot]:
                    continue
                begun.append({name: batch.arrays[name][row, column].copy() for name in names})
                if (final := at_end.get((row, column))) is not None:
                    self._rows[slot] += begun
                    self._lengths[slot].append(len(begun))
                    self._final[slot].append({name: value.copy() for name, value in final.items()})
                    self._begun[slot] = None

    def result(self) -> RecordedEpisodes:
        """Return the complete episodes. There must be at least one."""
        rows = [row for of_slot in self._rows for row in of_slot]
        final = [each for of_slot in self._final for each in of_slot]
        return RecordedEpisodes(
            {name: np.stack([row[name] for row in rows]) for name in rows[0]},
            {name: np.stack([each[name] for each in final]) for name in final[0]},
            np.array([length for of_slot in self._lengths for length in of_slot]),
        )


def record_episodes(
    env: ClusterEnv, agent: Agent, episodes: int, *, seed: int | None = None, max_steps: int = MAX_STEPS
) -> RecordedEpisodes:
    """Run complete episodes and record them, evenly distributed over the environments.

    Args:
        env: The environments, which must record the same infos (`EnvConfig.info_keys`) as those of the learner.
        agent: The agent, which must return what the learner needs: for A-RIDE `action` and `logprob`, the
            log-probability with which it chose the action.
        episodes: Number of episodes.
        seed: Seed of the environments; None: that of their configuration.
        max_steps: Maximum number of steps of each environment.

    Returns:
        The episodes; `save` writes them to a file.

    Raises:
        RunError: Fewer episodes ended within `max_steps` steps.

    Example:
        record_episodes(env, agent, 128).save(Path("warmup.npz"))
    """
    env.reset(seed=seed)
    recorder = EpisodeRecorder(episode_quotas(episodes, env.num_envs))
    for start in range(0, max_steps, _STEPS):
        recorder.add(env.collect(agent, min(_STEPS, max_steps - start)))
        if recorder.count == episodes:
            return recorder.result()
    raise RunError(
        f"only {recorder.count:,} of {counted(episodes, 'episode')} ended within {max_steps:,} steps of each "
        "environment. Raise max_steps, or give the environment a time limit (gymnasium.wrappers:TimeLimit)."
    )
