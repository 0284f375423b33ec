"""Adaptive synchronization with acting servers: one running divergence and one count of pulls per server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from farstep.errors import RemoteEnvError
from farstep.sync import AAPS
from tests.cluster.checks import assert_balanced, cluster, eventually, within
from tests.cluster.served.test_served import OVER_THE_NETWORK
from tests.cluster.test_aaps import CoinAgent, versions_while_drifting

pytestmark = pytest.mark.slow  # real processes, or learning


@pytest.mark.parametrize("options", [{"inference": "served"}, OVER_THE_NETWORK], ids=["node", "head"])
def test_a_server_pulls_exactly_when_the_divergence_exceeds_the_threshold(options: dict[str, Any]) -> None:
    with cluster(envs=4, workers=2, sync=AAPS(0.05, window=1), **options) as env:
        pulls = len(set(versions_while_drifting(env, 0.05)))
        stats = env.stats()
    assert stats["pulls"] == {"total": pulls, "per_worker": [pulls, pulls]}
    assert stats["bytes"]["weights_sent"] == pulls * 64  # one number, aligned
    assert stats["bytes"]["probes_sent"] > 0


def test_a_stream_continues_with_probes_after_a_server_was_killed() -> None:
    agent = CoinAgent()
    with cluster(envs=4, workers=2, sync=AAPS(0.05), inference={"copies": 2}) as env:
        stream = env.stream(agent, steps=5, max_staleness=4)
        for k in range(12):
            if k == 6:
                os.kill(env.stats()["acting"][0]["pid"], signal.SIGKILL)
            batch = within(lambda: next(stream))
            assert (batch["version"] <= env.version).all()
            agent.logit += 0.1
            within(lambda: env.publish(agent))
        stream.close()
        stats = env.stats()
        assert_balanced(stats)
        assert 2 <= stats["pulls"]["total"] < 2 * 12
        assert stats["acting"][0]["restarts"] == 1


class InterruptedCoin(CoinAgent):
    """Calls `interrupt` once, in the process that created it, while it is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "interrupt": None}

    def distribution(self, obs: Any) -> Any:
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            interrupt()
        return super().distribution(obs)


@pytest.mark.parametrize("options", [{"inference": "served"}, OVER_THE_NETWORK], ids=["node", "head"])
def test_a_server_that_is_replaced_during_a_publish_gets_a_probe(options: dict[str, Any]) -> None:
    agent = InterruptedCoin()
    with cluster(envs=4, workers=2, sync=AAPS(10.0), **options) as env:
        stream = env.stream(agent, steps=5, max_staleness=4)

        def replace_server() -> None:
            os.kill(env.stats()["acting"][0]["pid"], signal.SIGKILL)

            def has_acted() -> bool:
                next(stream)
                (server,) = env.stats()["acting"]
                return bool(server["restarts"] and server["rows"])

            eventually(has_acted)

        within(lambda: next(stream))
        agent.interrupt = replace_server
        agent.logit = agent.logit + 0.1
        assert within(lambda: env.publish(agent)) == 1 and agent.interrupt is None
        eventually(lambda: (within(lambda: next(stream))["version"] == 1).all())
        stream.close()


class BrokenCoin(CoinAgent):
    """A copy with the first weights cannot be compared on many rows."""

    def distribution(self, obs: Any) -> Any:
        if self.logit[0] == 0.0 and len(obs) > 8:
            raise ValueError("deliberate")
        return super().distribution(obs)


def test_exception_of_a_comparison_in_the_server_reaches_the_caller() -> None:
    agent = BrokenCoin()
    with cluster(envs=4, workers=2, sync=AAPS(0.05), inference="served") as env:
        within(lambda: env.collect(agent, 32))
        agent.logit = agent.logit + 0.01
        within(lambda: env.publish(agent))
        with pytest.raises(RemoteEnvError, match="deliberate"):
            within(lambda: env.collect(agent, 8))
