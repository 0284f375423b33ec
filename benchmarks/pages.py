"""The tables of benchmarks/README.md and docs/, out of the results that are committed.

python benchmarks/pages.py             # writes all of them
python benchmarks/pages.py --check     # only says which of them differ from the results
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aaps
import async_tables
import buffer
import bulk
import learning_tables
import network
import scale
import scaling
import stagger
import tables
import transfer
import triggers
from children import run_script
from document import put_between
from roster import BENCHMARKS
from runner import runs_in

README = BENCHMARKS / "README.md"
DOCS = BENCHMARKS.parent / "docs"
RESULTS = BENCHMARKS / "results"


def throughput_summary(document: Mapping[str, Any]) -> str:
    return tables.summary(
        runs_in(document, lambda run: tables.Case(run["env"], run["num_envs"], run["sampler"])),
    )


def buffer_summary(document: Mapping[str, Any]) -> str:
    return buffer.markdown(runs_in(document, lambda run: buffer.Case(run["observations"], run["sampler"])))


@dataclass(frozen=True)
class Section:
    """What stands on a page between two marks."""

    page: Path
    mark: str
    results: str
    """A file under results/."""
    summary: Callable[[dict[str, Any]], str]

    def written(self, page: str) -> str:
        """The page, with this section as the results have it."""
        document = json.loads((RESULTS / self.results).read_text())
        marks = f"<!-- {self.mark}: begin -->", f"<!-- {self.mark}: end -->"
        return put_between(page, self.summary(document), marks)


SECTIONS = (
    Section(README, "throughput", "throughput.json", throughput_summary),
    Section(README, "throughput-pong", "throughput-pong.json", throughput_summary),
    Section(README, "throughput-pong-seeds", "throughput-pong-seeds.json", throughput_summary),
    Section(README, "scaling", "scaling-16-cores.json", scaling.summary),
    Section(README, "scale", "scale-16-cores.json", scale.summary),
    Section(README, "buffer", "buffer.json", buffer_summary),
    Section(README, "learning", "learning.json", learning_tables.summary),
    Section(README, "async", "async-16-cores.json", async_tables.summary),
    Section(README, "network", "network.json", network.summary),
    Section(README, "bulk", "bulk.json", lambda document: bulk.summary(document["megabytes_per_second"])),
    Section(README, "bulk-16-cores", "bulk-16-cores.json", lambda found: bulk.summary(found["megabytes_per_second"])),
    Section(README, "transfer", "transfer.json", transfer.summary),
    Section(README, "triggers", "triggers.json", triggers.summary),
    Section(README, "triggers-per-chunk", "triggers-per-chunk.json", triggers.per_chunk_summary),
    Section(DOCS / "aaps.md", "aaps-large", "aaps-large.json", aaps.summary),
    Section(DOCS / "aaps.md", "aaps", "aaps.json", aaps.summary),
    Section(DOCS / "stagger.md", "stagger-chain", "stagger.json", stagger.chain_summary),
    Section(DOCS / "stagger.md", "stagger-pendulum", "stagger.json", stagger.pendulum_summary),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; the status is 1 if a table differs")
    options = parser.parse_args()
    differing = 0
    for section in SECTIONS:
        before = section.page.read_text()
        after = section.written(before)
        if after != before:
            differing += 1
            print(f"{section.page.name}: {section.mark} differs from results/{section.results}")
            if not options.check:
                section.page.write_text(after)
    return int(options.check and differing > 0)


if __name__ == "__main__":
    run_script(main)
