"""An agent as a worker uses it: NumPy observations in, NumPy outputs out, whatever the framework between."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from farstep.core import Nested
from farstep.errors import AgentError

log = logging.getLogger(__name__)


class Policy:
    """Calls `act` with what its signature asks for, on the fast path where that agrees with eager."""

    def __init__(self, agent: Any, inference: str = "eager") -> None:
        if not callable(getattr(agent, "act", None)):
            raise AgentError(f"{type(agent).__name__} has no act(obs); see farstep.core.Agent for what is needed.")
        self.agent = agent
        self.is_torch = is_torch_module(agent)
        self.recurrent = callable(getattr(agent, "initial_state", None))
        self.wants_rng = "rng" in _parameters_of(agent.act)
        self.note = "eager"
        self._has_doubles: bool | None = None
        """Whether observations are float64, once one was seen; looked at in every step it would cost 5 us."""
        self._fast: Any = None
        self._example: tuple[Nested, ...] = ()
        self._constants = b""
        self._inference = inference
        if self.is_torch:
            import torch

            self._torch = torch

    def initial_state(self, num_envs: int) -> Nested:
        """The recurrent state before the first step, or None."""
        return self.agent.initial_state(num_envs) if self.recurrent else None

    def __call__(self, obs: Nested, state: Nested, episode_start: Any, rng: Sequence[Any] | None) -> dict[str, Any]:
        """One step for a batch: a mapping with `action`, further outputs, and `state` if recurrent."""
        if self._fast is not None:
            return _mapping(self._fast(*self._arguments(obs, state, episode_start)))
        return self._eager(obs, state, episode_start, rng)

    def _eager(self, obs: Nested, state: Nested, episode_start: Any, rng: Sequence[Any] | None) -> dict[str, Any]:
        if self.is_torch:
            with self._torch.inference_mode():
                arguments = [self._tensors(a) for a in self._arguments(obs, state, episode_start)]
                return _mapping(self._arrays(self.agent.act(*arguments, **self._generators(rng))))
        return _mapping(self.agent.act(*self._arguments(obs, state, episode_start), **self._generators(rng)))

    def _generators(self, rng: Sequence[Any] | None) -> dict[str, Any]:
        return {"rng": rng} if self.wants_rng else {}

    def _arguments(self, obs: Nested, state: Nested, episode_start: Any) -> tuple[Nested, ...]:
        if self.is_torch and self._has_doubles is not False:
            obs = self._floats(obs)
        return (obs, state, episode_start) if self.recurrent else (obs,)

    def _floats(self, value: Nested) -> Nested:
        """float64 observations become torch's default type, as modules expect."""
        if self._has_doubles is None:
            self._has_doubles = self._single() and _any_doubles(value)
        if isinstance(value, Mapping):
            return {key: self._floats(sub) for key, sub in value.items()}
        if isinstance(value, tuple):
            return tuple(self._floats(sub) for sub in value)
        return value.astype(np.float32) if self._has_doubles and value.dtype == np.float64 else value

    def _single(self) -> bool:
        return bool(self._torch.get_default_dtype() == self._torch.float32)

    def _tensors(self, value: Nested) -> Nested:
        if isinstance(value, Mapping):
            return {key: self._tensors(sub) for key, sub in value.items()}
        if isinstance(value, (tuple, list)):
            return tuple(self._tensors(sub) for sub in value)
        return self._torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    def _arrays(self, value: Nested) -> Nested:
        if isinstance(value, Mapping):
            return {key: self._arrays(sub) for key, sub in value.items()}
        if isinstance(value, (tuple, list)):
            return tuple(self._arrays(sub) for sub in value)
        return value.detach().cpu().numpy() if isinstance(value, self._torch.Tensor) else np.asarray(value)

    # ---- the fast path: recorded once, compared with eager at the start and after every load of weights ----

    def accelerate(self, obs: Nested, state: Nested, episode_start: Any) -> None:
        """Record `act` as a straight program if it can be trusted to do the same; else say why not, once."""
        if self._inference != "auto" or not self.is_torch:
            self.note = "eager" if self.is_torch else "the agent's own act"
            return
        self._example = tuple(_copied(a) for a in self._arguments(obs, state, episode_start))
        unsuitable = "act takes a generator per slot" if self.wants_rng else None
        reason = unsuitable or self._record() or self._disagreement()
        self._settle(reason)

    def check_after_load(self) -> None:
        """Compare the two paths with the new weights; record again if a setter replaced tensors."""
        if self._fast is None:
            return
        reason = None
        moved = not self._fast.is_current() or _constants_of(self.agent) != self._constants
        if moved or self._disagreement() is not None:
            reason = self._record() or self._disagreement()
        self._settle(reason)

    def _settle(self, reason: str | None) -> None:
        if reason is None:
            self.note = "fast"
            return
        self._fast = None
        self.note = f"eager: {reason}"
        log.info("inference is eager, since %s", reason)

    def _record(self) -> str | None:
        from farstep.agents.tape import Untraceable, compile_act

        rng = self._torch.get_rng_state()
        try:
            self._fast = compile_act(self.agent.act, *[self._tensors(a) for a in self._example])
        except Untraceable as error:
            return str(error)
        finally:
            self._torch.set_rng_state(rng)
        self._constants = _constants_of(self.agent)
        return None

    def _disagreement(self) -> str | None:
        """How the recording differs from `act` on the same rows with the same random numbers; None if it does not."""
        from farstep.agents.tape import equal_results

        torch = self._torch
        rng = torch.get_rng_state()
        try:
            with torch.inference_mode():
                eager = _copied(self._arrays(self.agent.act(*[self._tensors(a) for a in self._example])))
            torch.set_rng_state(rng)
            difference = equal_results(_mapping(eager), _mapping(self._fast(*self._example)))
        except Exception as error:  # whatever a replay trips over, eager is right
            return f"the recorded program failed: {type(error).__name__}: {error}"
        finally:
            torch.set_rng_state(rng)
        return difference and f"the recorded program differs from act: {difference}"


def _any_doubles(value: Nested) -> bool:
    if isinstance(value, Mapping):
        return any(_any_doubles(sub) for sub in value.values())
    if isinstance(value, tuple):
        return any(_any_doubles(sub) for sub in value)
    return bool(value.dtype == np.float64)


def is_torch_module(agent: Any) -> bool:
    """Whether the agent is a torch module; torch is imported by the agent itself or not at all."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(agent, torch.nn.Module)


def ship(agent: Any) -> bytes:
    """The agent as bytes for a worker; tensors on a GPU travel as CPU tensors."""
    import io

    buffer = io.BytesIO()
    try:
        _CpuPickler(buffer).dump(agent)
    except Exception as error:
        raise AgentError(
            f"the agent ({type(agent).__name__}) cannot be sent to workers: {type(error).__name__}: {error}. "
            "Keep environments, loggers, locks and open files out of it."
        ) from error
    return buffer.getvalue()


class _CpuPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            data = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                return torch.nn.Parameter, (data, obj.requires_grad)
            return _as_is, (data,)
        return super().reducer_override(obj)


def _as_is(value: Any) -> Any:
    return value


class _ConstantsPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def persistent_id(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        return (tuple(obj.shape), str(obj.dtype)) if isinstance(obj, torch.Tensor) else None


def _constants_of(agent: Any) -> bytes:
    """Everything of the agent but its tensors, as bytes: what a recording takes for constant."""
    import io

    buffer = io.BytesIO()
    _ConstantsPickler(buffer).dump(vars(agent))
    return buffer.getvalue()


def _parameters_of(function: Any) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _mapping(output: Nested) -> dict[str, Any]:
    return dict(output) if isinstance(output, Mapping) else {"action": output}


def _copied(value: Nested) -> Nested:
    if isinstance(value, Mapping):
        return {key: _copied(sub) for key, sub in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_copied(sub) for sub in value)
    return value.copy() if isinstance(value, np.ndarray) else value.clone() if hasattr(value, "clone") else value
