"""An act that is not a function of inputs, weights and torch's random numbers is refused, not replayed wrongly."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from farstep.agents.tape import Untraceable, compile_act  # noqa: E402
from tests.agents.tape.tape_agents import check  # noqa: E402


class Stateful(nn.Module):
    """One method for each way of not being a function of inputs, weights and torch's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(4)
        self.weight, self.register = nn.Parameter(torch.ones(4)), torch.zeros(3, 4)
        self.steps, self.rng, self.table = 0, np.random.default_rng(0), np.zeros(4, np.float32)
        self.last: Tensor = torch.zeros(3, 4)
        self.history: list[Tensor] = []
        self.nothing = float("nan")

    def branches(self, obs: Tensor) -> Tensor:
        return obs + 1 if obs.sum() > 0 else obs - 1

    def reads_item(self, obs: Tensor) -> Tensor:
        return obs * obs.mean().item()

    def reads_item_and_catches(self, obs: Tensor) -> Tensor:
        try:
            return obs * obs.mean().item()
        except Exception:
            return obs

    def reads_parameter(self, obs: Tensor) -> Tensor:
        return obs * float(self.weight[0])

    def reads_list(self, obs: Tensor) -> Tensor:
        return obs * obs[0].tolist()[0]

    def goes_through_numpy(self, obs: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(obs.numpy())) + obs

    def goes_through_asarray(self, obs: Tensor) -> Tensor:
        return torch.as_tensor(np.asarray(obs + 1) * 2)

    def goes_through_dlpack(self, obs: Tensor) -> Tensor:
        return torch.from_dlpack(np.from_dlpack(obs + 1) * 2)

    def branches_on_an_array(self, obs: Tensor) -> Tensor:
        return obs + 1 if (obs + 1).numpy()[0, 0] > 0 else obs - 1

    def converts_an_array(self, obs: Tensor) -> object:
        return (obs + 1).numpy().astype(np.float64)

    def computes_with_an_array(self, obs: Tensor) -> object:
        return 2 * (obs + 1).numpy()

    def compares_an_array_and_catches(self, obs: Tensor) -> object:
        try:
            return obs + 1 if (obs + 1).numpy().mean() > 0 else obs
        except Exception:
            return obs

    def keeps_an_array(self, obs: Tensor) -> Tensor:
        self.table = (obs[0] + 1).numpy()
        return obs + 1

    def selects(self, obs: Tensor) -> Tensor:
        return obs[obs > 0].sum()

    def classes_from_data(self, obs: Tensor) -> Tensor:
        return nn.functional.one_hot(obs.argmax(-1))

    def changes_input(self, obs: Tensor) -> Tensor:
        return obs.mul_(2)

    def changes_parameter(self, obs: Tensor) -> Tensor:
        self.weight += 1  # type: ignore[misc]
        return obs * self.weight

    def changes_register(self, obs: Tensor) -> Tensor:
        self.register.copy_(obs)
        return obs + 1

    def changes_statistics(self, obs: Tensor) -> Tensor:
        return self.norm(obs)

    def replaces_attribute(self, obs: Tensor) -> Tensor:
        self.last = self.last + obs
        return self.last

    def replaces_data(self, obs: Tensor) -> Tensor:
        hidden = obs + 1
        hidden.data = obs * 2
        return hidden

    def fills_a_list(self, obs: Tensor) -> Tensor:
        self.history.append(obs)
        return obs * 2

    def counts(self, obs: Tensor) -> Tensor:
        self.steps += 1
        return obs * 2

    def scales_by_count(self, obs: Tensor) -> Tensor:
        self.steps += 1
        return obs * self.steps

    def draws_python(self, obs: Tensor) -> Tensor:
        return obs if random.random() < 2 else -obs

    def draws_numpy(self, obs: Tensor) -> Tensor:
        return obs + torch.as_tensor(np.random.normal(size=4))

    def draws_own(self, obs: Tensor) -> Tensor:
        return obs if self.rng.random() < 2 else -obs

    def changes_table(self, obs: Tensor) -> Tensor:
        torch.from_numpy(self.table).add_(obs[0])
        return obs + 1

    def returns_half(self, obs: Tensor) -> Tensor:
        return obs.bfloat16()

    def uses_meta(self, obs: Tensor) -> Tensor:
        return torch.zeros(3, device="meta") + 1


@pytest.mark.parametrize("name", [name for name in vars(Stateful) if not name.startswith("_")])
@pytest.mark.slow
def test_act_that_cannot_be_traced_is_refused(name: str) -> None:
    with pytest.raises(Untraceable) as caught:
        compile_act(getattr(Stateful(), name), torch.linspace(-1, 2, 12).view(3, 4))
    assert "\n" not in str(caught.value) and str(caught.value)[0].islower()


def test_state_in_a_closure_is_seen() -> None:
    calls = {"count": 0}

    def act(obs: Tensor) -> Tensor:
        calls["count"] += 1
        return obs + 1

    with pytest.raises(Untraceable, match="count"):
        compile_act(act, torch.zeros(3))


def test_nan_in_an_attribute_does_not_count_as_a_change() -> None:
    agent = Stateful()
    check(lambda obs: agent.net(obs), lambda: torch.randn(3, 4))


def test_an_error_that_only_recordings_raise_is_the_reason() -> None:
    calls = []

    def act(obs: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:  # after two eager calls
            raise ValueError("no third call\nat all")
        return obs + 1

    with pytest.raises(Untraceable, match=r"^a recording fails with ValueError: no third call$"):
        compile_act(act, torch.zeros(3, 4))
