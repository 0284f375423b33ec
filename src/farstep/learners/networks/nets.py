"""Actor-critic networks: the agents of farstep's learners, on workers and on the head.

    obs ── encoders ──┬── actor layers ── heads ──► sample, log-probability
                      └── critic layers ──────────► value

Actor and critic share image encoders and the recurrent core; all other layers are separate.
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
from farstep.core import Nested
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.networks.encoders import Encoders, Features, hidden_layers, module_key, orthogonal
from farstep.learners.networks.heads import GaussianHead, head_for
from farstep.learners.networks.normalizers import RewardScale
from farstep.learners.options.checks import check_choice, check_counts
from farstep.schema import leaf_names, leaf_spaces, leaves, map_leaves, nest, space_schema

Space = gymnasium.spaces.Space[Any]
State = tuple[Tensor, ...]
Recurrence = Literal["none", "gru", "lstm"]


@show_fields
@dataclass(frozen=True, kw_only=True)
class NetConfig:
    """Options of the agent's network.

    Raises:
        ConfigError: An option is unknown or out of range.
    """

    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of the actor, and also of the critic. Ignored for images."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Activation function between layers; relu is the fastest."""
    recurrent: Recurrence = "none"
    """Recurrent core between encoders and heads."""
    core: int = 128
    """Width of the recurrent core."""
    normalize_obs: bool = True
    """Normalize observations, except images, by their running mean and standard deviation. Workers receive these
    statistics with the weights."""
    normalize_reward: bool = True
    """Divide rewards by the running standard deviation of discounted returns."""

    def __post_init__(self) -> None:
        check_choice(self, "activation", ("tanh", "relu", "silu"))
        check_choice(self, "recurrent", ("none", "gru", "lstm"))
        check_counts(self, "core")
        for width in self.hidden:
            check_count("hidden", width)

    @property
    def is_recurrent(self) -> bool:
        """Whether the agent has a recurrent core."""
        return self.recurrent != "none"


DEFAULT_NET = NetConfig()


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of recorded samples under the current policy; all tensors have shape `[n]`."""

    logprob: Tensor
    """Log-probabilities of the samples."""
    entropy: Tensor
    """Entropies of the policy, in nats."""
    value: Tensor
    """Values of the observations."""


class ActorCritic(NetworkAgent):
    """Agent without a recurrent core. It acts on workers, and the learner on the head optimizes it.

    Args:
        observation_space: Space of single observations.
        action_space: Space of single actions.
        config: Options of the network.
        gamma: Discount factor, for the running statistics of returns (`normalize_reward`).

    Raises:
        SpaceError: A space is not supported.
    """

    learner_only = ("critic.", "reward_scale.")

    def __init__(self, observation_space: Space, action_space: Space, config: NetConfig, gamma: float = 0.99) -> None:
        super().__init__(observation_space, action_space, config, gamma)
        self._action, _ = space_schema(action_space, "action")
        self.encoders: Features = self.make_encoders(observation_space, config)
        width = self.encoders.width
        self.reward_scale = RewardScale(gamma) if config.normalize_reward else None
        self.sees_images = self.encoders.sees_images
        hidden = () if self.sees_images else config.hidden
        self.core = _core(config, width)
        width = width if self.core is None else config.core
        self.actor, actor_width = hidden_layers(width, hidden, config.activation)
        critic, critic_width = hidden_layers(width, hidden, config.activation)
        self.critic = nn.Sequential(critic, orthogonal(nn.Linear(critic_width, 1), 1.0))
        action_spaces = leaf_spaces(action_space, "action")
        self.heads = nn.ModuleDict({module_key(n): head_for(s, actor_width) for n, s in action_spaces.items()})
        self.keeps_samples = any(isinstance(head, GaussianHead) for head in self.heads.values())
        """Whether samples are recorded in addition to actions, because clipping may change actions."""
        self.normalizes_obs = config.normalize_obs

    def make_encoders(self, observation_space: Space, config: NetConfig) -> Features:
        """Make the first layers. Override this to use layers of your own, such as a transformer.

        Args:
            observation_space: Space of single observations.
            config: Options of the network.

        Returns:
            A module from observations to features.
        """
        return Encoders(observation_space, config.normalize_obs)

    # ---- on a worker ----

    def act(self, obs: Nested) -> dict[str, Any]:
        """Sample actions.

        Args:
            obs: Observations `[n, ...]`.

        Returns:
            `action`, `logprob` and `value`, and `sample` if actions may differ from samples; each `[n, ...]`.
        """
        return self._act(self._encode(obs))

    def distribution(self, obs: Nested) -> Mapping[str, Any]:
        """Return the parameters of the action distributions. AAPS computes the divergence from them.

        Args:
            obs: Observations `[n, ...]`.

        Returns:
            Parameters by name, such as `logits`. If the action space has several arrays, a mapping with one entry per
            array.
        """
        return self._describe(self._encode(obs))

    # ---- on the head ----

    def evaluate(self, obs: Nested, sample: Nested) -> Evaluation:
        """Evaluate recorded samples under the current policy.

        Args:
            obs: Observations `[n, ...]`.
            sample: The samples `[n, ...]` that were drawn for them.

        Returns:
            Log-probabilities, entropies and values.
        """
        return self.evaluate_features(self._encode(obs), sample)

    def evaluate_features(self, features: Tensor, sample: Nested) -> Evaluation:
        """Evaluate recorded samples, given the features of their observations.

        Args:
            features: Output of encoders and recurrent core, `[n, width]`.
            sample: The samples `[n, ...]` that were drawn for them.

        Returns:
            Log-probabilities, entropies and values.
        """
        hidden = self.actor(features)
        scores = [self.heads[module_key(n)].evaluate(hidden, part) for n, part in leaves(self._action, sample)]  # type: ignore[operator]
        logprob, entropy = scores[0]
        for more_logprob, more_entropy in scores[1:]:
            logprob, entropy = logprob + more_logprob, entropy + more_entropy
        return Evaluation(logprob, entropy, self._value(features))

    def value(self, obs: Nested) -> Tensor:
        """Compute the values of observations.

        Args:
            obs: Observations `[n, ...]`.

        Returns:
            Values `[n]`.
        """
        return self._value(self._encode(obs))

    @torch.no_grad()
    def update_moments(self, obs: Nested) -> None:
        """Update the running statistics of observations.

        Args:
            obs: Observations `[n, ...]`, not normalized.
        """
        self.encoders.update_moments(obs)

    # ---- layers ----

    def _encode(self, obs: Nested) -> Tensor:
        return self.encoders(obs)

    def _act(self, features: Tensor) -> dict[str, Any]:
        hidden = self.actor(features)
        samples, actions, logprob = {}, {}, None
        for name, head in self._named_heads():
            if self.greedy:
                sample = head.mode(hidden)
                head_logprob = head.evaluate(hidden, sample)[0]
            else:
                sample, head_logprob = head.sample(hidden)
            samples[name], actions[name] = sample, head.action(sample)
            logprob = head_logprob if logprob is None else logprob + head_logprob
        out = {"action": nest(self._action, actions), "logprob": logprob, "value": self._value(features)}
        return {**out, "sample": nest(self._action, samples)} if self.keeps_samples else out

    def _describe(self, features: Tensor) -> dict[str, Any]:
        hidden = self.actor(features)
        parts = {module_key(name): head.describe(hidden) for name, head in self._named_heads()}
        return parts if len(parts) > 1 else next(iter(parts.values()))

    def _value(self, features: Tensor) -> Tensor:
        value: Tensor = self.critic(features)
        return value.squeeze(-1)

    def _named_heads(self) -> Iterator[tuple[str, Any]]:
        for name in leaf_names(self._action):
            yield name, self.heads[module_key(name)]


class RecurrentActorCritic(ActorCritic):
    """Agent with a GRU or LSTM core. Its state continues from chunk to chunk.

    Args:
        observation_space: Space of single observations.
        action_space: Space of single actions.
        config: Options of the network; `recurrent` chooses the core.
        gamma: Discount factor, for the running statistics of returns (`normalize_reward`).

    Raises:
        SpaceError: A space is not supported.
    """

    core: nn.GRUCell | nn.LSTMCell

    def initial_state(self, num_envs: int) -> State:
        """Return the state at the start of an episode.

        Args:
            num_envs: Number of environments.

        Returns:
            Zeros `[num_envs, core]`: one tensor for a GRU, two for an LSTM.
        """
        tensors = 2 if isinstance(self.core, nn.LSTMCell) else 1
        return tuple(torch.zeros(num_envs, self.core.hidden_size) for _ in range(tensors))

    def act(self, obs: Nested, state: State, episode_start: Tensor) -> dict[str, Any]:  # type: ignore[override]
        """Sample actions.

        Args:
            obs: Observations `[n, ...]`.
            state: Recurrent state before these observations.
            episode_start: True where an episode starts, `[n]`; the state is reset there.

        Returns:
            The arrays of `ActorCritic.act`, and `state`, the new recurrent state.
        """
        features, state = self.step_core(self._encode(obs), state, episode_start)
        return {**self._act(features), "state": state}

    def distribution(self, obs: Nested, state: State, episode_start: Tensor) -> Mapping[str, Any]:  # type: ignore[override]
        """Return the parameters of the action distributions, as `ActorCritic.distribution` does.

        Args:
            obs: Observations `[n, ...]`.
            state: Recurrent state before these observations.
            episode_start: True where an episode starts, `[n]`; the state is reset there.

        Returns:
            Parameters by name.
        """
        return self._describe(self.step_core(self._encode(obs), state, episode_start)[0])

    def step_core(self, features: Tensor, state: State, episode_start: Tensor) -> tuple[Tensor, State]:
        """Run one step of the recurrent core.

        Args:
            features: Output of the encoders, `[n, width]`.
            state: Recurrent state before these observations.
            episode_start: True where an episode starts, `[n]`; the state is reset there.

        Returns:
            The output of the core `[n, core]`, and the new state.
        """
        keep = (~episode_start).to(features.dtype)[:, None]
        kept = tuple(part * keep for part in state)
        new = self.core(features, kept if isinstance(self.core, nn.LSTMCell) else kept[0])
        new = new if isinstance(new, tuple) else (new,)
        return new[0], new

    def unroll(self, obs: Nested, state: State, episode_start: Tensor) -> tuple[Tensor, list[State]]:
        """Apply encoders and recurrent core to sequences.

        Args:
            obs: Observations `[T, n, ...]`.
            state: Recurrent state before the first row.
            episode_start: True where an episode starts, `[T, n]`; the state is reset there.

        Returns:
            Features `[T * n, core]`, and the state after each row.
        """
        rows, columns = episode_start.shape
        encoded = self._encode(_flat(obs)).reshape(rows, columns, -1)
        outputs, states = [], []
        for t in range(rows):
            features, state = self.step_core(encoded[t], state, episode_start[t])
            outputs.append(features)
            states.append(state)
        return torch.cat(outputs), states

    def evaluate_sequences(self, obs: Nested, sample: Nested, state: State, episode_start: Tensor) -> Evaluation:
        """Evaluate recorded samples of sequences under the current policy.

        Args:
            obs: Observations `[T, n, ...]`.
            sample: The samples `[T, n, ...]` that were drawn for them.
            state: Recurrent state before the first row.
            episode_start: True where an episode starts, `[T, n]`.

        Returns:
            Log-probabilities, entropies and values, each `[T * n]`.
        """
        features, _ = self.unroll(obs, state, episode_start)
        return self.evaluate_features(features, _flat(sample))

    def value_after(self, obs: Nested, state: State) -> Tensor:
        """Compute the values of observations that follow a known recurrent state.

        Args:
            obs: Observations `[n, ...]`.
            state: Recurrent state before these observations.

        Returns:
            Values `[n]`.
        """
        starts = torch.zeros(len(state[0]), dtype=torch.bool, device=state[0].device)
        return self._value(self.step_core(self._encode(obs), state, starts)[0])


def make_agent(observation_space: Space, action_space: Space, config: NetConfig, gamma: float) -> ActorCritic:
    """Make an agent for the spaces of an environment.

    Args:
        observation_space: Space of single observations, as `env.launch()` returns it.
        action_space: Space of single actions, as `env.launch()` returns it.
        config: Options of the network.
        gamma: Discount factor of the learner, for the running statistics of returns.

    Returns:
        A `RecurrentActorCritic` if `config.recurrent` is not "none", otherwise an `ActorCritic`. Weights are drawn from
        torch's global generator.

    Raises:
        SpaceError: A space is not supported.

    Example:
        >>> agent = make_agent(*env.launch(), NetConfig(hidden=(128, 128)), gamma=0.99)
    """
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


def _flat(value: Nested) -> Nested:
    """Flatten sequences `[T, n, ...]` to rows `[T * n, ...]`."""
    return map_leaves(lambda tensor: tensor.flatten(0, 1), value)
