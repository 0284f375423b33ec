"""The ids of messages in the reports of consumers."""

from __future__ import annotations

from farstep.workflow.triggers.messages import Message


def id_of(message: Message) -> str:
    """Return the id of a message in reports: its own id, or the id of its trigger if it has none."""
    return str(message.get("message_id") or message.get("trigger_id", ""))


def trigger_of(name: str) -> str:
    """Return the trigger of the message with this id."""
    return name.rpartition("/")[0] or name
