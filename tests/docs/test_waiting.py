"""The page about diagnoses lists every rule, as the code has it."""

from __future__ import annotations

from pathlib import Path

from farstep.observe.diagnosis.causes import RULES

PAGE = Path(__file__).parents[2] / "docs" / "waiting.md"
BEGIN, END = "checked by tests/docs/test_waiting.py -->\n", "<!-- end of causes -->"


def causes_table() -> str:
    rows = [f"| {rule.cause} | {rule.symptom} | {rule.remedy.removesuffix('.')} |" for rule in RULES]
    return "\n".join(["\n| cause | how it looks | what to do |", "|---|---|---|", *rows]) + "\n\n"


def test_the_table_of_causes_is_that_of_the_rules() -> None:
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert table == causes_table(), f"put this into {PAGE.name}:\n{causes_table()}"
