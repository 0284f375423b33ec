"""Every test that docs/security.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def test_each_line_has_a_test_that_exists() -> None:
    short = dict(re.findall(r"`(\w+)`(?: is)?\s+`(tests/[\w/]+\.py)`", PAGE))
    assert set(short) == {"bulk", "fuzz", "links", "sessions", "executed", "keys"}
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "shown by" not in line]
    claims = [row for row in rows if row.count("|") == 3]
    assert len(claims) > 20
    for row in claims:
        shown = row.split("|")[2]
        assert re.findall(r"`([\w/.]+)`", shown), row
        file = ""
        for word in re.findall(r"`([^`]+)`", shown):
            if word in short or word.startswith("tests/"):
                file = short.get(word, word)
                assert (ROOT / file).exists(), file
            elif word.startswith("test_"):
                assert f"def {word}(" in (ROOT / file).read_text(), (file, word)
