"""How a worker calls the agent: NumPy arrays in, NumPy arrays out, for any framework."""

from __future__ import annotations

import copy
import inspect
import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import numpy as np

from farstep.agents.base_weights import BaseWeights
from farstep.agents.parameters import as_array, is_torch_module
from farstep.core import Array, Nested
from farstep.errors import AgentError, described
from farstep.schema import flat, map_leaves

log = logging.getLogger(__name__)
FAST = "fast: workers replay the recorded torch operations of act"
"""`Policy.note` of an agent whose `act` was recorded."""
UNPICKLABLE = "an attribute of the agent cannot be pickled, so its changes could not be detected"
"""Why `act` of an agent is not recorded if `constants_of` fails."""
MAX_IN_FLIGHT = 2
"""Largest number of batches that were launched and whose outputs are still needed."""


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Launched:
    """A call of `act` whose outputs may not be computed yet."""

    wait: Callable[[], dict[str, Any]]
    """Waits for the outputs, and returns them."""
    is_done: Callable[[], bool] = _always
    """Whether the outputs are computed."""


class Policy:
    """Calls `act` with the arguments that its signature names, or a recorded program with the same results.

    Args:
        agent: The agent.
        inference: "auto" to record a program if possible, otherwise "eager".
        has_gpu: Whether to move a torch module to the GPU.
        slots: The environment slot of each row, for an `act` that takes `slots`; None: 0, 1, ...
    """

    def __init__(self, agent: Any, inference: str = "eager", has_gpu: bool = False, slots: Array | None = None) -> None:
        if not callable(getattr(agent, "act", None)):
            raise AgentError(
                f"{type(agent).__name__} has no act(obs); see farstep.core.Agent for the methods of an agent."
            )
        self.agent = agent
        self.is_torch = is_torch_module(agent)
        self.recurrent = callable(getattr(agent, "initial_state", None))
        parameters = _parameters_of(agent.act)
        self.wants_rng, self._wants_slots = "rng" in parameters, "slots" in parameters
        self.slots = slots
        """The environment slot of each row, for an `act` that takes `slots`; None: 0, 1, ..."""
        own = ("rng", "slots")
        further = [name for name, needed in list(parameters.items())[1:] if needed and name not in own]
        if further and not self.recurrent:
            raise AgentError(
                f"act requires {further} beside obs. Only a recurrent agent gets these, and "
                f"{type(agent).__name__} is not recurrent: add initial_state(n), or define act(obs) or "
                "act(obs, rng)."
            )
        self.note = "eager"
        """How `act` is called, as shown to users: `FAST`, or "eager" with the reason."""
        self._has_doubles: bool | None = None
        """Whether observations are float64; None before the first observation. A check in every step would cost 5
        us."""
        self._fast: Any = None
        self._example: tuple[Nested, ...] = ()
        self._constants = b""
        self._inference = inference
        if self.is_torch:
            import torch

            self._torch = torch
        self.device = self._moved() if has_gpu and self.is_torch else None
        """The GPU that the module was moved to; None if it was not moved."""

    def _moved(self) -> str | None:
        """Move the module to the only GPU that this process sees, and return the device."""
        if not self._torch.cuda.is_available():
            log.warning("this process was assigned a GPU, but torch sees none; the agent acts on the CPU")
            return None
        self._torch.nn.Module.to(self.agent, "cuda")
        return "cuda"

    def initial_state(self, num_envs: int) -> Nested:
        """Return the recurrent state before the first step; None if the agent is not recurrent."""
        if not self.recurrent:
            return None
        state = self.agent.initial_state(num_envs)
        return map_leaves(as_array, state) if self.is_torch else state

    def __call__(self, obs: Nested, state: Nested, episode_start: Any, rng: Sequence[Any] | None) -> dict[str, Any]:
        """Act on a batch of observations; return `action`, further outputs, and `state` if recurrent."""
        if self._fast is not None:
            return mapping_of(self._fast(*self._arguments(obs, state, episode_start)))
        return self._eager(obs, state, episode_start, rng)

    def launch(self, obs: Nested, state: Nested, episode_start: Any, rng: Sequence[Any] | None) -> Launched:
        """Act as `__call__` does, without waiting for a GPU if possible (see `overlaps`).

        If `overlaps`, the next batch may be launched before the outputs of this one are used; the batch after that may
        overwrite them.
        """
        out = self(obs, state, episode_start, rng)
        return Launched(lambda: out)

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns before the outputs are computed."""
        return False

    def _eager(self, obs: Nested, state: Nested, episode_start: Any, rng: Sequence[Any] | None) -> dict[str, Any]:
        # Copy, because `act` may change or keep its arguments, and these rows become part of the batch.
        obs = map_leaves(np.ndarray.copy, obs)
        if self.recurrent:
            episode_start = episode_start.copy()
        arguments = self._arguments(obs, state, episode_start)
        further = self._generators(rng) | self._slot_numbers(arguments)
        if not self.is_torch:
            return mapping_of(self.agent.act(*arguments, **further))
        with self._torch.inference_mode():
            return mapping_of(map_leaves(as_array, self.agent.act(*self._tensors(arguments), **further)))

    def _slot_numbers(self, arguments: Sequence[Nested]) -> dict[str, Any]:
        """Return the argument `slots` of `act`, if it takes it: int64 `[n]`, a tensor for a torch module."""
        if not self._wants_slots:
            return {}
        slots = self._slot_array(len(next(flat(arguments[0]))))
        return {"slots": self._tensors(slots) if self.is_torch else slots}

    def _slot_array(self, count: int) -> Array:
        known = self.slots is not None and len(self.slots) == count
        return np.array(self.slots if known else np.arange(count), np.int64)

    def priorities(self, rows: Mapping[str, Nested]) -> Array:
        """Call the agent's `priorities(rows)` on the rows of a chunk.

        Args:
            rows: Arrays `[steps, n, ...]` by name.

        Returns:
            One priority per row, `[steps, n]`.

        Raises:
            AgentError: The agent returned something else, or a priority that is negative or not finite.
        """
        shape = rows["reward"].shape
        if self.is_torch:
            with self._torch.inference_mode():
                found = as_array(self.agent.priorities(self._tensors(dict(rows))))
        else:
            found = np.asarray(self.agent.priorities(dict(rows)))
        if found.dtype.kind not in "fiu" or found.shape != shape:
            got = f"{found.dtype}{list(found.shape)}"
            raise AgentError(f"priorities() returned {got}; expected one number per row, {list(shape)}.")
        if not (np.isfinite(found) & (found >= 0)).all():
            raise AgentError("priorities() returned a number that is negative or not finite; expected 0 or above.")
        return found

    def query(self, method: str, arguments: Sequence[Nested]) -> Any:
        """Call another method of the agent on arrays (observations first). Keep its modes and random states unchanged.

        A torch module runs in evaluation mode on its own device, so that the results on head and worker are comparable.
        """
        return self._call(self.agent, method, arguments)

    def act_on_copy(self, arguments: Sequence[Nested]) -> dict[str, Any]:
        """Call `act` on a copy of the agent, because `act` may change the agent's own counters or random generators."""
        count = len(next(flat(arguments[0])))
        generators = self._generators([np.random.default_rng(0) for _ in range(count)])
        slots = self._slot_numbers(arguments)
        return mapping_of(self._call(self._copied(), "act", arguments, **generators, **slots))

    def _copied(self) -> Any:
        """Return a copy of the agent that shares the parameters and non-leaf tensors of the module."""
        shared: list[Any] = []
        if self.is_torch:
            kept = [value for module in self._torch.nn.Module.modules(self.agent) for value in vars(module).values()]
            shared = [value for value in kept if isinstance(value, self._torch.Tensor) and not value.is_leaf]
            shared += self._torch.nn.Module.parameters(self.agent)
        try:
            return copy.deepcopy(self.agent, {id(value): value for value in shared})
        except Exception as error:
            name = type(self.agent).__name__
            raise AgentError(
                f"policies are compared by what act returns on a copy of {name}, but copy.deepcopy cannot copy it "
                f"({type(error).__name__}: {error}). Add distribution(obs), which is called on {name} itself."
            ) from error

    def _call(self, agent: Any, method: str, arguments: Sequence[Nested], **generators: Any) -> Any:
        function = getattr(agent, method)
        if not self.is_torch:
            with same_randomness():
                return function(*arguments, **generators)
        obs, *rest = arguments
        # Call torch's own methods: the agent may override parameters() or modules().
        parameters = self._torch.nn.Module.parameters(agent)
        device = next((tensor.device for tensor in parameters), self._torch.device("cpu"))
        tensors = [map_leaves(lambda t: t.to(device), self._tensors(value)) for value in (self._floats(obs), *rest)]
        modes = {module: module.training for module in self._torch.nn.Module.modules(agent)}
        try:
            for module in modes:
                module.training = False
            with self._torch.no_grad(), same_randomness():  # not inference_mode, because the agent may cache tensors
                return function(*tensors, **generators)
        finally:
            for module, training in modes.items():
                module.training = training

    def _generators(self, rng: Sequence[Any] | None) -> dict[str, Any]:
        return {"rng": rng} if self.wants_rng else {}

    def _arguments(self, obs: Nested, state: Nested, episode_start: Any) -> tuple[Nested, ...]:
        if self.is_torch and self._has_doubles is not False:
            obs = self._floats(obs)
        return (obs, state, episode_start) if self.recurrent else (obs,)

    def _floats(self, obs: Nested) -> Nested:
        """Convert float64 observations to float32 if this is torch's default dtype, because modules expect it."""
        if self._has_doubles is None:
            single = self._torch.get_default_dtype() == self._torch.float32
            self._has_doubles = single and any(leaf.dtype == np.float64 for leaf in flat(obs))
        if not self._has_doubles:
            return obs
        return map_leaves(lambda leaf: leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf, obs)

    def _tensors(self, value: Nested) -> Nested:
        tensors = map_leaves(self._torch.from_numpy, value)
        return tensors if self.device is None else map_leaves(lambda t: t.to(self.device), tensors)

    # ---- fast path: recorded once; compared with `act` at the start and after every load of weights ----

    def accelerate(self, obs: Nested, state: Nested, episode_start: Any) -> None:
        """Record `act` as a program. If the program gives other results than `act`, log the reason and stay eager."""
        if self.device is not None:
            self.note = f"eager on {self.device}"
            return
        if self._inference != "auto" or not self.is_torch:
            self.note = "eager" if self.is_torch else "the agent's own act"
            return
        self._example = map_leaves(np.array, self._arguments(obs, state, episode_start))
        unsuitable = "act takes a generator per slot" if self.wants_rng else None
        reason = unsuitable or self._record() or self._disagreement()
        self._choose_path(reason)

    def check_after_load(self) -> None:
        """Compare program and `act` with the new weights. If tensors were replaced or results differ, record again."""
        if self._fast is None:
            return
        reason = None
        is_outdated = not self._fast.is_current() or constants_of(self.agent) != self._constants
        if is_outdated or self._disagreement() is not None:
            reason = self._record() or self._disagreement()
        self._choose_path(reason)

    def _choose_path(self, reason: str | None) -> None:
        """Use the program if `reason` is None; otherwise stay eager."""
        if reason is None:
            self.note = FAST
            return
        self._fast = None
        self.note = f"eager: {reason}"
        log.info("inference is eager, since %s", reason)

    def _record(self) -> str | None:
        """Record `act` as a program. Return None, or the reason why recording is not possible."""
        from farstep.agents.tape import Untraceable, compile_act

        rng = self._torch.get_rng_state()
        try:
            act = self.agent.act
            if slots := self._slot_numbers(self._example):  # the same in every call on a worker
                act = partial(act, **slots)
            self._fast = compile_act(act, *self._tensors(self._example))
        except Untraceable as error:
            return str(error)
        finally:
            self._torch.set_rng_state(rng)
        self._constants = constants_of(self.agent)
        return None if self._constants else UNPICKLABLE

    def _disagreement(self) -> str | None:
        """Run program and `act` on the same rows and random numbers; return the difference, or None."""
        from farstep.agents.tape import equal_results

        torch = self._torch
        rng = torch.get_rng_state()
        try:
            with torch.inference_mode():
                slots = self._slot_numbers(self._example)
                eager = map_leaves(as_array, self.agent.act(*self._tensors(self._example), **slots))
            torch.set_rng_state(rng)
            difference = equal_results(mapping_of(eager), mapping_of(self._fast(*self._example)))
        except Exception as error:  # fall back to `act` itself
            return f"the recorded program failed: {described(error)}"
        finally:
            torch.set_rng_state(rng)
        return difference and f"the recorded program differs from act: {difference}"


class same_randomness:  # noqa: N801
    """Context manager: restores the global random generators on exit, so that a trial call has no side effect on
    them."""

    def __enter__(self) -> None:
        self._torch = sys.modules.get("torch")
        self._states = (random.getstate(), np.random.get_state())
        self._tensor_state = self._torch.get_rng_state() if self._torch else None
        uses_gpu = self._torch is not None and self._torch.cuda.is_initialized()
        self._gpu_state = self._torch.cuda.get_rng_state() if self._torch and uses_gpu else None

    def __exit__(self, *_: object) -> None:
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        if self._torch is not None and self._tensor_state is not None:
            self._torch.set_rng_state(self._tensor_state)
            if self._gpu_state is not None:
                self._torch.cuda.set_rng_state(self._gpu_state)


def ship(agent: Any, base: BaseWeights | None = None) -> bytes:
    """Pickle the agent for workers, with GPU tensors as CPU tensors.

    Args:
        agent: The agent.
        base: Its base, which workers get separately; None if it has none.

    Raises:
        AgentError: The agent is a class, or cannot be pickled.
    """
    import io

    if isinstance(agent, type):
        raise AgentError(f"the agent is the class {agent.__name__}; pass an instance, e.g. {agent.__name__}().")
    buffer = io.BytesIO()
    try:
        _CpuPickler(buffer, base).dump(agent)
    except Exception as error:
        raise AgentError(
            f"the agent ({type(agent).__name__}) cannot be sent to workers: {described(error)}. "
            "Keep environments, loggers, locks and open files out of it."
        ) from error
    return buffer.getvalue()


class _CpuPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, buffer: Any, base: BaseWeights | None) -> None:
        super().__init__(buffer)
        self._references = {} if base is None else base.references

    def persistent_id(self, obj: Any) -> Any:
        return self._references.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        torch, lora = sys.modules.get("torch"), sys.modules.get("farstep.agents.lora")
        if lora is not None and (reduced := lora.reduce_without_peft(obj)) is not None:
            return reduced
        if torch is None or not isinstance(obj, torch.Tensor):
            return super().reducer_override(obj)
        is_parameter = isinstance(obj, torch.nn.Parameter)
        if obj.device.type not in ("cpu", "meta"):
            data = obj.detach().cpu()
            return (torch.nn.Parameter, (data, obj.requires_grad)) if is_parameter else (_as_is, (data,))
        if is_parameter and _is_view(obj):
            return torch.nn.Parameter, (obj.detach().clone(), obj.requires_grad)
        return super().reducer_override(obj)


def _is_view(parameter: Any) -> bool:
    """Whether a parameter is a part of larger memory, e.g. of an optimizer's vector; pickling it would pickle all."""
    is_dense = str(parameter.layout) == "torch.strided" and parameter.device.type == "cpu"
    return is_dense and bool(parameter.untyped_storage().nbytes() > parameter.nbytes)


def _as_is(value: Any) -> Any:
    return value


class _ConstantsPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def persistent_id(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        return (tuple(obj.shape), str(obj.dtype)) if isinstance(obj, torch.Tensor) else None


def constants_of(agent: Any) -> bytes:
    """Pickle the attributes that a recording treats as constants: all except tensors. Empty if pickling fails."""
    import io

    buffer = io.BytesIO()
    try:
        _ConstantsPickler(buffer).dump(vars(agent))
    except Exception:  # pickling an attribute may raise anything
        return b""
    return buffer.getvalue()


def _parameters_of(function: Any) -> dict[str, bool]:
    """Return the names of a function's parameters, and whether each is required."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {name: p.default is p.empty and p.kind not in variadic for name, p in found.items()}


def mapping_of(output: Nested) -> dict[str, Any]:
    """Return what `act` returned as a mapping."""
    return dict(output) if isinstance(output, Mapping) else {"action": output}
