"""The answers of an acting server to the requests of one batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farstep.acting import messages as am
from farstep.acting.mailbox import ANSWER, COUNTS_AS, DIVERGENCE, FAILED, PULLS, VERSION, divergence_bits
from farstep.acting.serving.arena import Requests
from farstep.acting.serving.batch_actor import Batch
from farstep.wire.channels.doorbell import Fence


@dataclass
class Answers:
    """The answers to the requests of one batch."""

    requests: Sequence[Requests]
    version: int
    """The version that acts."""
    counts_as: int
    """The version that it counts as."""
    failure: am.Failed | None = None
    """Why there are no actions."""
    batch: Batch | None = None
    """None if the policy did not start to act."""

    def is_done(self) -> bool:
        """Whether the policy has acted, or has failed."""
        try:
            return self.batch is None or self.batch.launched.is_done()
        except Exception:
            return True  # waiting for the outputs raises the error again

    def send(self, output_names: Iterable[str], total_pulls: int, divergence: float | None, fence: Fence) -> None:
        """Write the answers into the mailboxes, and notify the workers that wait.

        Args:
            output_names: The arrays that the policy returns.
            total_pulls: Weight pulls of this server.
            divergence: The last running divergence of the current weights.
            fence: Makes the answers visible before their numbers.
        """
        if self.batch is not None and self.failure is None:
            self.batch.answer(output_names)
        totals, has_failed = (total_pulls, divergence), self.failure is not None
        for requests in self.requests:
            words, groups = requests.arena.group_words, requests.groups
            words[VERSION][groups], words[COUNTS_AS][groups] = self.version, self.counts_as
            words[FAILED][groups] = has_failed
            if requests.arena.totals != totals:
                requests.arena.totals = totals
                requests.arena.mailbox_words[PULLS][:] = total_pulls
                requests.arena.mailbox_words[DIVERGENCE][:] = divergence_bits(divergence)
        fence()
        for requests in self.requests:
            requests.arena.group_words[ANSWER][requests.groups] = requests.numbers
            if self.failure is not None:
                for client, _ in requests.clients():
                    client.failure = self.failure
        fence()  # a worker sets `WAITS` before it looks for its answer for the last time
        for requests in self.requests:
            for client, group in requests.arena.clients_of(requests.groups[requests.waits]):
                client.notify(group)
