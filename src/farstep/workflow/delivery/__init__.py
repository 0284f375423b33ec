"""Deliveries: they bring a trigger's message to its consumer by a call, in a thread or in another process.

    Dispatcher ─ delivery(message) ─ ... ─ take() ─ consumer ─ done(message) ─ ... ─ delivery.finished()

A delivery returns True if the message is done, and False if `finished` will report it later. All waits have a time
limit.
"""

from __future__ import annotations

from farstep.workflow.delivery.local import Direct, LocalQueue
from farstep.workflow.delivery.processes import ZmqReceiver, ZmqSender

__all__ = ["Direct", "LocalQueue", "ZmqReceiver", "ZmqSender"]
