"""Prints docs/metrics.md: `python -m farstep.observe.glossary > docs/metrics.md`."""

from __future__ import annotations

import sys

from farstep.observe.glossary.page import page

sys.stdout.write(page())
