"""The slot ledger sums the seconds of held slots, on a clock that the test sets."""

from __future__ import annotations

from farstep.elastic.slot_ledger import SlotLedger


def test_seconds_are_summed_over_slots_from_acquisition_to_release() -> None:
    ledger = SlotLedger()
    ledger.acquire(0, 10.0)
    ledger.acquire(1, 11.0)
    ledger.release(0, 13.0)
    assert ledger.held == 1
    assert ledger.held_seconds(15.0) == 3.0 + 4.0  # slot 1 is still held
    ledger.acquire(0, 20.0)
    ledger.release(0, 20.5)
    ledger.release(1, 21.0)
    assert ledger.held == 0
    assert ledger.held_seconds(99.0) == 3.0 + 10.0 + 0.5


def test_repeated_reports_change_nothing() -> None:
    ledger = SlotLedger()
    ledger.release(3, 1.0)
    ledger.acquire(3, 2.0)
    ledger.acquire(3, 5.0)
    ledger.release(3, 6.0)
    ledger.release(3, 9.0)
    assert ledger.held_seconds(9.0) == 4.0
