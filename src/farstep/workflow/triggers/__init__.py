"""Triggers, the ledger that they test, and the dispatcher that evaluates them. Nothing here blocks or reads a clock."""

from __future__ import annotations

from farstep.config.transfer import TransferTrigger
from farstep.workflow.triggers.dispatch import Delivery, Dispatcher
from farstep.workflow.triggers.ledger import Ledger
from farstep.workflow.triggers.messages import Message
from farstep.workflow.triggers.trigger import AllOf, AnyOf, Trigger
from farstep.workflow.triggers.triggers import DataKeyTrigger, ObjectKeyTrigger, TimeTrigger

__all__ = [
    "AllOf",
    "AnyOf",
    "DataKeyTrigger",
    "Delivery",
    "Dispatcher",
    "Ledger",
    "Message",
    "ObjectKeyTrigger",
    "TimeTrigger",
    "TransferTrigger",
    "Trigger",
]
