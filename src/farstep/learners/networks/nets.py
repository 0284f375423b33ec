"""Actor and critic for any space: the agent of farstep's learners, on workers and on the head.

    obs ── encoders ──┬── actor layers ── heads ──► sample, log-probability
                      └── critic layers ──────────► value

Images and recurrent cores are shared by actor and critic; vectors get layers of their own for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import torch
from torch import Tensor, nn

from farstep.config.env import check_count
from farstep.config.field_docs import show_fields
from farstep.core import Array, Nested
from farstep.learners.loop.checks import check_choice, check_counts
from farstep.learners.networks.encoders import encoder_for, initialised, is_image
from farstep.learners.networks.heads import GaussianHead, head_for
from farstep.learners.networks.normalizers import RewardScale
from farstep.schema import leaf_names, leaf_spaces, leaves, map_leaves, nest, space_schema

Space = gymnasium.spaces.Space[Any]
State = tuple[Tensor, ...]
Recurrence = Literal["none", "gru", "lstm"]


@show_fields
@dataclass(frozen=True, kw_only=True)
class NetConfig:
    """The agent's network."""

    hidden: tuple[int, ...] = (64, 64)
    """widths of the layers of actor and critic"""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """between layers; relu is the quickest"""
    recurrent: Recurrence = "none"
    """a core with memory between encoder and heads"""
    core: int = 128
    """width of the recurrent core"""
    normalize_obs: bool = True
    """observations in units of their running standard deviation, except images; the statistics travel with the
    weights"""
    normalize_reward: bool = True
    """rewards in units of the discounted return's running standard deviation"""

    def __post_init__(self) -> None:
        check_choice(self, "activation", ("tanh", "relu", "silu"))
        check_choice(self, "recurrent", ("none", "gru", "lstm"))
        check_counts(self, "core")
        for width in self.hidden:
            check_count("hidden", width)

    @property
    def is_recurrent(self) -> bool:
        return self.recurrent != "none"


DEFAULT_NET = NetConfig()


@dataclass(frozen=True)
class Evaluation:
    """What the policy says of samples that were taken, flat `[n]`."""

    logprob: Tensor
    entropy: Tensor
    value: Tensor


class ActorCritic(nn.Module):
    """An agent without memory."""

    def __init__(self, observation_space: Space, action_space: Space, config: NetConfig, gamma: float = 0.99) -> None:
        super().__init__()
        self._made_of = (observation_space, action_space, config, gamma)
        self._obs, _ = space_schema(observation_space, "obs")
        self._action, _ = space_schema(action_space, "action")
        seen = leaf_spaces(observation_space, "obs")
        self.encoders = nn.ModuleDict({_key(n): encoder_for(s, config.normalize_obs) for n, s in seen.items()})
        widths: list[Any] = [encoder.width for encoder in self.encoders.values()]
        width = sum(widths)
        self.reward_scale = RewardScale(gamma) if config.normalize_reward else None
        self.sees_images = any(is_image(space) for space in seen.values())
        hidden = () if self.sees_images else config.hidden
        self.core = _core(config, width)
        width = width if self.core is None else config.core
        self.actor, actor_width = _layers(width, hidden, config.activation)
        critic, critic_width = _layers(width, hidden, config.activation)
        self.critic = nn.Sequential(critic, initialised(nn.Linear(critic_width, 1), 1.0))
        acted = leaf_spaces(action_space, "action")
        self.heads = nn.ModuleDict({_key(n): head_for(s, actor_width) for n, s in acted.items()})
        self.keeps_samples = any(isinstance(head, GaussianHead) for head in self.heads.values())
        """The environment gets something else than was sampled, so samples are recorded, too."""
        self.normalizes_obs = config.normalize_obs
        self.greedy = False
        """Take the most likely action, as in an evaluation."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by its tensors: an optimizer may have made them views of one vector, which each would bring along.
        state = {name: tensor.numpy(force=True).copy() for name, tensor in self.state_dict().items()}
        return _made_again, (type(self), self._made_of, state, self.greedy)

    # ---- on a worker ----

    def act(self, obs: Nested) -> dict[str, Any]:
        """Sample actions for a row of observations."""
        return self._act(self._encode(obs))

    def get_parameters(self) -> dict[str, Any]:
        return self.state_dict()

    def distribution(self, obs: Nested) -> Mapping[str, Any]:
        """What AAPS compares."""
        return self._describe(self._encode(obs))

    # ---- on the head ----

    def evaluate(self, obs: Nested, sample: Nested) -> Evaluation:
        """Score samples `[n, ...]` that were taken on observations."""
        return self.evaluate_features(self._encode(obs), sample)

    def evaluate_features(self, features: Tensor, sample: Nested) -> Evaluation:
        """As `evaluate`, of observations that went through encoders and memory."""
        hidden = self.actor(features)
        scores = [self.heads[_key(n)].evaluate(hidden, part) for n, part in leaves(self._action, sample)]  # type: ignore[operator]
        logprob, entropy = scores[0]
        for more_logprob, more_entropy in scores[1:]:
            logprob, entropy = logprob + more_logprob, entropy + more_entropy
        return Evaluation(logprob, entropy, self._value(features))

    def value(self, obs: Nested) -> Tensor:
        """Values `[n]`."""
        return self._value(self._encode(obs))

    @torch.no_grad()
    def update_moments(self, obs: Nested) -> None:
        """Take raw observations `[n, ...]` into the running statistics."""
        for name, array in leaves(self._obs, obs):
            self.encoders[_key(name)].update(array)  # type: ignore[operator]

    # ---- parts ----

    def _encode(self, obs: Nested) -> Tensor:
        parts = [self.encoders[_key(name)](array) for name, array in leaves(self._obs, obs)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _act(self, features: Tensor) -> dict[str, Any]:
        hidden = self.actor(features)
        samples, actions, logprob = {}, {}, None
        for name, head in self._named_heads():
            if self.greedy:
                sample = head.mode(hidden)
                scored = head.evaluate(hidden, sample)[0]
            else:
                sample, scored = head.sample(hidden)
            samples[name], actions[name] = sample, head.action(sample)
            logprob = scored if logprob is None else logprob + scored
        out = {"action": nest(self._action, actions), "logprob": logprob, "value": self._value(features)}
        return {**out, "sample": nest(self._action, samples)} if self.keeps_samples else out

    def _describe(self, features: Tensor) -> dict[str, Any]:
        hidden = self.actor(features)
        parts = {_key(name): head.describe(hidden) for name, head in self._named_heads()}
        return parts if len(parts) > 1 else next(iter(parts.values()))

    def _value(self, features: Tensor) -> Tensor:
        value: Tensor = self.critic(features)
        return value.squeeze(-1)

    def _named_heads(self) -> Iterator[tuple[str, Any]]:
        for name in leaf_names(self._action):
            yield name, self.heads[_key(name)]


class RecurrentActorCritic(ActorCritic):
    """An agent with memory: a GRU or LSTM whose state is handed over from chunk to chunk."""

    core: nn.GRUCell | nn.LSTMCell

    def initial_state(self, num_envs: int) -> State:
        parts = 2 if isinstance(self.core, nn.LSTMCell) else 1
        return tuple(torch.zeros(num_envs, self.core.hidden_size) for _ in range(parts))

    def act(self, obs: Nested, state: State, episode_start: Tensor) -> dict[str, Any]:  # type: ignore[override]
        features, state = self.step_core(self._encode(obs), state, episode_start)
        return {**self._act(features), "state": state}

    def distribution(self, obs: Nested, state: State, episode_start: Tensor) -> Mapping[str, Any]:  # type: ignore[override]
        return self._describe(self.step_core(self._encode(obs), state, episode_start)[0])

    def step_core(self, features: Tensor, state: State, episode_start: Tensor) -> tuple[Tensor, State]:
        """One step of memory, forgotten where an episode starts."""
        keep = (~episode_start).to(features.dtype)[:, None]
        kept = tuple(part * keep for part in state)
        new = self.core(features, kept if isinstance(self.core, nn.LSTMCell) else kept[0])
        new = new if isinstance(new, tuple) else (new,)
        return new[0], new

    def unroll(self, obs: Nested, state: State, episode_start: Tensor) -> tuple[Tensor, list[State]]:
        """Features of sequences `[T, n, ...]`, flat `[T * n, width]`, and the state after each row."""
        rows, columns = episode_start.shape
        encoded = self._encode(_flat(obs)).reshape(rows, columns, -1)
        outputs, states = [], []
        for t in range(rows):
            features, state = self.step_core(encoded[t], state, episode_start[t])
            outputs.append(features)
            states.append(state)
        return torch.cat(outputs), states

    def evaluate_sequences(self, obs: Nested, sample: Nested, state: State, episode_start: Tensor) -> Evaluation:
        """Score samples of sequences `[T, n, ...]`; flat, as `evaluate` does."""
        features, _ = self.unroll(obs, state, episode_start)
        return self.evaluate_features(features, _flat(sample))

    def value_after(self, obs: Nested, state: State) -> Tensor:
        """Values of observations `[n, ...]` that follow rows which left this state."""
        starts = torch.zeros(len(state[0]), dtype=torch.bool, device=state[0].device)
        return self._value(self.step_core(self._encode(obs), state, starts)[0])


def _made_again(
    kind: type[ActorCritic], made_of: tuple[Any, ...], state: Mapping[str, Array], greedy: bool
) -> ActorCritic:
    """An agent like the one that was pickled or copied, on the CPU."""
    with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and thrown away
        agent = kind(*made_of)
    agent.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    agent.greedy = greedy
    return agent


def make_agent(observation_space: Space, action_space: Space, config: NetConfig, gamma: float) -> ActorCritic:
    """The agent for these spaces."""
    kind = ActorCritic if config.recurrent == "none" else RecurrentActorCritic
    return kind(observation_space, action_space, config, gamma)


def _core(config: NetConfig, width: int) -> nn.Module | None:
    if config.recurrent == "none":
        return None
    core = (nn.GRUCell if config.recurrent == "gru" else nn.LSTMCell)(width, config.core)
    for name, parameter in core.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
        else:
            nn.init.orthogonal_(parameter)
    return core


def _layers(width: int, hidden: tuple[int, ...], activation: str) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = []
    between = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}[activation]
    for size in hidden:
        layers += [initialised(nn.Linear(width, size)), between()]
        width = size
    return nn.Sequential(*layers), width


def _key(name: str) -> str:
    """An array's name as torch accepts it for a module."""
    return name.replace(".", "/")


def _flat(value: Nested) -> Nested:
    """Sequences `[T, n, ...]` as rows `[T * n, ...]`."""
    return map_leaves(lambda tensor: tensor.flatten(0, 1), value)
