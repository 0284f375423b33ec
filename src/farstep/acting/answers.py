"""The answers of an acting server to the requests of one batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farstep.acting import messages as am
from farstep.acting.batch_actor import Batch
from farstep.acting.mailbox import ANSWER, COUNTS_AS, DIVERGENCE, FAILED, PULLS, VERSION, divergence_bits
from farstep.acting.server_clients import Request
from farstep.wire.channels.doorbell import Fence


@dataclass
class Answers:
    """The answers to the requests of one batch."""

    requests: Sequence[Request]
    version: int
    """The version that acts."""
    counts_as: int
    """The version that it counts as."""
    failure: am.Failed | None = None
    """Why there are no actions."""
    batch: Batch | None = None
    """None if the policy did not start to act."""

    def send(self, output_names: Iterable[str], total_pulls: int, divergence: float | None, fence: Fence) -> None:
        """Write the answers into the mailboxes, and notify the workers.

        Args:
            output_names: The arrays that the policy returns.
            total_pulls: Weight pulls of this server.
            divergence: The last running divergence of the current weights.
            fence: Makes the answers visible before their numbers.
        """
        if self.batch is not None and self.failure is None:
            self.batch.answer(output_names)
        bits, is_failed = divergence_bits(divergence), int(self.failure is not None)
        for client, group, *_ in self.requests:
            client.failure = self.failure or client.failure
            assert client.mailbox is not None
            client.mailbox.words[PULLS], client.mailbox.words[DIVERGENCE] = total_pulls, bits
            words = group.words
            words[VERSION], words[COUNTS_AS], words[FAILED] = self.version, self.counts_as, is_failed
        fence()
        for client, group, number, *_ in self.requests:
            group.words[ANSWER] = number
            group.arrived = 0.0
            client.notify(group)
