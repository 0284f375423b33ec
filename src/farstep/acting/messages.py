"""Messages between a worker and its acting server, over a Unix socket or over the network. Each request has one answer.

worker                          server
Join ────────────────────────►                       after `SendAgent`, and after a restart of the server
                ◄────────────── Joined, or Failed    on one host, with the descriptors of mailbox and doorbells
Save, Restore, Prioritize ───►
                ◄────────────── Done, or Failed
Explain ─────────────────────►                       after the mailbox said that a request failed
                ◄────────────── Failed

Over the network, worker and server each have a mailbox of their own. What one side writes is sent to the other:

Act ─────────────────────────►                       a request of a group
                ◄────────────── Acted                its answer
Update ──────────────────────►                       words that the server must know before it continues
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import msgspec

from farstep.core import BytesLike
from farstep.schema import Schema
from farstep.wire.messages.headers import Count, Word, decoded


class Join(msgspec.Struct, tag="join"):
    """A worker asks the server to act for it. The next frame has its current observations, encoded by `codec.pack`."""

    worker: int
    agent: int
    first: int
    """The worker's first slot."""
    roots: list[int]
    episodes: list[int]
    """Root seed and current episode of each slot."""
    obs: bytes
    """How observations are nested, encoded by `codec.pack`."""
    obs_schema: Schema
    action_schema: Schema
    groups: list[int]
    """Number of environments in each group."""
    proof: bytes
    """Shows that the worker has the run's secret: `proof(secret, "worker")`."""


class Joined(msgspec.Struct, tag="joined"):
    """The server acts for the worker from now on.

    On one host, it carries three descriptors: the mailbox's memory, the server's doorbell and the worker's doorbell.
    """

    schema: Schema
    """The arrays that `act` returns, per environment."""
    structure: bytes
    recorded: bytes
    """How these arrays are nested, without and with the agent's priorities, encoded by `codec.pack`."""
    state: Schema
    state_structure: bytes
    note: str
    """How the server calls the agent, for `stats()`."""
    has_priorities: bool
    proof: bytes
    """Shows that the server has the run's secret: `proof(secret, "server")`."""
    pulls: Count = 0
    """Number of weight pulls of this server so far."""
    mailbox_index: Count = 0
    num_mailboxes: Count = 1
    """Which of the mailboxes in the memory is that of the worker, and how many there are."""
    description: Schema = {}
    """As `AgentReady.description`."""


class Act(msgspec.Struct, tag="act"):
    """A request of a group. The next frame has the arrays `MailboxLayout.request`."""

    group: Count
    words: list[Word]
    """The words of the group that the worker writes."""
    held: Count
    """The mailbox's word `HELD`."""


class Update(msgspec.Struct, tag="update"):
    """The words `HELD` of the mailbox and `USED` of each group, at the end of a chunk and before other requests."""

    held: Count
    used: list[Count]


class Acted(msgspec.Struct, tag="acted"):
    """The answer to `Act`. The next frame has the arrays `MailboxLayout.answer`."""

    group: Count
    words: list[Word]
    """The words of the group that the server writes."""
    totals: list[Word]
    """The words `TOTALS` of the mailbox."""


class Failed(msgspec.Struct, tag="failed"):
    """The agent raised, or cannot be used."""

    message: str
    traceback: str
    phase: str
    kind: str = ""
    """The class of the exception, if Python or farstep defines it; otherwise empty."""


class Save(msgspec.Struct, tag="save"):
    """Return the recurrent state and the generators of the worker's slots."""


class Restore(msgspec.Struct, tag="restore"):
    """Restore what `Save` returned; it is in the next frame."""


class Prioritize(msgspec.Struct, tag="prioritize"):
    """Call `priorities` of the agent on the rows in the next frame."""


class Explain(msgspec.Struct, tag="explain"):
    """Return why the last failed request of the worker failed."""


class Done(msgspec.Struct, tag="done"):
    """The result of a request is in the next frame, encoded by `codec.pack`."""


FromClient = Join | Act | Update | Save | Restore | Prioritize | Explain
FromServer = Joined | Acted | Failed | Done
_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def proof(secret: str, role: str) -> bytes:
    """What a process of this role sends to show that it has the secret. It does not reveal the other role's proof."""
    return hmac.digest(secret.encode(), role.encode(), "sha256")


def encode(message: FromClient | FromServer) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_from_client(frames: Sequence[BytesLike]) -> FromClient:
    """Decode a worker's message. Raise `WireError` if it is not valid."""
    return decoded(_from_client, frames)


def decode_from_server(frames: Sequence[BytesLike]) -> FromServer:
    """Decode the server's message. Raise `WireError` if it is not valid."""
    return decoded(_from_server, frames)
