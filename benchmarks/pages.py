"""Writes the tables and plots of benchmarks/README.md and docs/ from the committed results.

python benchmarks/pages.py             # writes all tables
python benchmarks/pages.py --plots     # and draws all plots again
python benchmarks/pages.py --check     # only says which tables differ from the results
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aaps
import aaps_cartpole
import ablation
import aride_tables
import async_return
import async_tables
import buffer
import bulk
import defaults
import elastic_tables
import frames
import large_policy_tables
import learning_tables
import network
import offpolicy_tables
import parked
import scale
import scaling
import speed_plot
import stagger
import tables
import transfer
import triggers
import uneven
from children import run_script
from document import machines, put_between
from roster import BENCHMARKS
from runner import runs_in

README = BENCHMARKS / "README.md"
DOCS = BENCHMARKS.parent / "docs"
IMAGES = DOCS / "images"
RESULTS = BENCHMARKS / "results"
OFFPOLICY_16, SLOW_UPDATES = "offpolicy-16-cores.json", "equal_updates-slow.json"


def throughput_results(document: Mapping[str, Any]) -> tables.Results:
    return runs_in(document, tables.Case.of)


def throughput_summary(document: Mapping[str, Any]) -> str:
    return tables.summary(throughput_results(document))


def ale_summary(document: Mapping[str, Any]) -> str:
    """The section of ale-py's vector environment: setting and tables."""
    setting = (
        f"{machines(document)}, {document['rounds']} rounds of {document['seconds']:g} s each "
        "(`results/throughput-pong-ale.json`). "
    )
    return f"{setting}{throughput_summary(document)}"


def stepping_summary(document: Mapping[str, Any]) -> str:
    return tables.stepping_summary(throughput_results(document))


def many_workers_summary(document: Mapping[str, Any]) -> str:
    """The section of stepping on many workers: setting and tables."""
    setting = (
        f"{document['workers']} workers on {machines(document)}, medians of {document['rounds']} rounds of "
        f"{document['seconds']:g} s (in brackets: best runs), also divided by those of the limit and of "
        "`AsyncVectorEnv`. Contenders `steps-*` have no policy, and their limit is `steps-alone`; the limit of the "
        "others is `limit-eager` (`results/stepping-16-cores.json`):"
    )
    return f"{setting}\n\n{tables.many_workers_summary(throughput_results(document))}"


def buffer_summary(document: Mapping[str, Any]) -> str:
    return buffer.markdown(runs_in(document, lambda run: buffer.Case(run["observations"], run["sampler"])))


@dataclass(frozen=True)
class Section:
    """A generated section of a page, between two marks."""

    page: Path
    mark: str
    results: str
    """A file under results/."""
    summary: Callable[[dict[str, Any]], str]
    command: str | None = None
    """Script that measures it; a section without results names it. None: results are required."""
    is_optional: bool = False
    """Whether a section without results stays as it was written by hand."""

    def written(self, page: str) -> str:
        """The page, with this section generated from the results."""
        path = RESULTS / self.results
        if self.is_optional and not path.exists():
            return page
        if self.command is not None and not path.exists():
            text = f"Not measured yet. To measure it, run `python benchmarks/{self.command}`."
        else:
            text = self.summary(json.loads(path.read_text()))
        if self.page.parent == DOCS:
            text = text.replace("`results/", "`benchmarks/results/")
        return put_between(page, text, (f"<!-- {self.mark}: begin -->", f"<!-- {self.mark}: end -->"))


def learners_section(learner: str, page: str) -> Section:
    """The section with the curves of a learner on its page."""
    summary = partial(defaults.learner_page, learner=learner)
    mark = "defaults-apex" if learner == "apex" else "defaults"  # it shares the page of DQN
    return Section(DOCS / page, mark, "defaults.json", summary, f"defaults.py --learners {learner}")


def elastic_claims(document: dict[str, Any]) -> str:
    """The claims table. Adaptive batches have a file of their own."""
    path = RESULTS / "elastic-batch.json"
    return elastic_tables.claims(document, json.loads(path.read_text()) if path.exists() else None)


def elastic_section(part: str) -> Section:
    """The section with one part of elastic.py."""
    summary, name = partial(elastic_tables.page, part=part), f"elastic-{part}"
    results = f"{name}.json" if part in elastic_tables.ALONE else "elastic.json"
    return Section(DOCS / "elasticity_measurements.md", name, results, summary, f"elastic.py --parts {part}")


SECTIONS = (
    Section(README, "throughput", "throughput.json", throughput_summary),
    Section(README, "throughput-pong", "throughput-pong.json", throughput_summary),
    Section(
        README,
        "throughput-pong-ale",
        "throughput-pong-ale.json",
        ale_summary,
        "throughput.py --env ALE/Pong-v5 --rounds 2 --seconds 20 --only 'limit-*' farstep-collect farstep-make_vec "
        "farstep-envpool-collect envpool-sync gymnasium-async '*ale-vector' --out "
        "benchmarks/results/throughput-pong-ale.json",
    ),
    Section(README, "throughput-pong-seeds", "throughput-pong-seeds.json", throughput_summary),
    Section(README, "stepping", "stepping.json", stepping_summary),
    Section(
        README,
        "stepping-16-cores",
        "stepping-16-cores.json",
        many_workers_summary,
        "throughput.py --workers 14 --env CartPole-v1 LunarLander-v3 --num-envs 112 448 --rounds 3 --only 'steps-*' "
        "limit-eager farstep-make_vec gymnasium-async --out benchmarks/results/stepping-16-cores.json",
    ),
    Section(README, "scaling", "scaling-16-cores.json", scaling.summary),
    Section(README, "scale", "scale-16-cores.json", scale.summary),
    Section(README, "scale-relay", "scale-relay.json", scale.relay_summary, is_optional=True),
    Section(README, "buffer", "buffer.json", buffer_summary),
    Section(README, "learning", "learning.json", learning_tables.summary),
    Section(README, "offpolicy", "offpolicy.json", offpolicy_tables.summary, "offpolicy.py"),
    Section(README, "offpolicy-16-cores", OFFPOLICY_16, partial(offpolicy_tables.summary, file=OFFPOLICY_16)),
    Section(README, "equal_updates", "equal_updates.json", offpolicy_tables.equal_updates),
    Section(README, "equal_updates-slow", SLOW_UPDATES, partial(offpolicy_tables.equal_updates, file=SLOW_UPDATES)),
    Section(README, "async", "async-16-cores.json", async_tables.summary),
    Section(README, "aride", "aride.json", aride_tables.summary, "aride.py"),
    Section(README, "uneven", "uneven.json", uneven.summary, "uneven.py"),
    Section(README, "elastic", "elastic.json", elastic_claims, "elastic.py"),
    *map(elastic_section, elastic_tables.PARTS),
    Section(DOCS / "elasticity_measurements.md", "parked", "parked.json", parked.summary, is_optional=True),
    elastic_section(elastic_tables.PREWARM),
    Section(
        DOCS / "sharing.md",
        "elastic-gpu",
        "elastic-gpu.json",
        partial(elastic_tables.page, part=elastic_tables.GPU),
        "elastic.py --parts gpu",
    ),
    Section(README, "network", "network.json", network.summary),
    Section(README, "bulk", "bulk.json", lambda document: bulk.summary(document["megabytes_per_second"])),
    Section(README, "bulk-16-cores", "bulk-16-cores.json", lambda found: bulk.summary(found["megabytes_per_second"])),
    Section(README, "transfer", "transfer.json", transfer.summary),
    Section(README, "triggers", "triggers.json", triggers.summary),
    Section(README, "triggers-per-chunk", "triggers-per-chunk.json", triggers.per_chunk_summary),
    Section(README, "defaults", "defaults.json", defaults.page, "defaults.py"),
    learners_section("ppo", "ppo.md"),
    learners_section("async-ppo", "async_ppo.md"),
    learners_section("impala", "impala.md"),
    learners_section("dqn", "dqn.md"),
    learners_section("apex", "dqn.md"),
    learners_section("sac", "sac.md"),
    learners_section("aride", "aride.md"),
    Section(
        DOCS / "async_ppo.md",
        "async-lunarlander",
        "async-lunarlander.json",
        async_return.page,
        "async.py --task lunarlander",
    ),
    Section(
        DOCS / "large_policies.md", "large-policy", "large_policy.json", large_policy_tables.page, "large_policy.py"
    ),
    Section(
        DOCS / "large_policies.md",
        "served-limit",
        "served-limit.json",
        large_policy_tables.served_page,
        "served_limit.py",
    ),
    Section(
        DOCS / "large_policies.md",
        "served-link",
        "served-link.json",
        large_policy_tables.link_page,
        "large_policy.py --where head --workers 2 --envs 16",
    ),
    Section(DOCS / "replay.md", "frames", "frames.json", frames.summary),
    Section(DOCS / "ppo.md", "ablation", "ablation.json", ablation.page, "ablation.py"),
    Section(DOCS / "aride.md", "aride", "aride.json", aride_tables.page, "aride.py"),
    Section(DOCS / "aaps.md", "aaps-ppo", "aaps-ppo.json", aaps.page, "aaps.py"),
    Section(
        DOCS / "aaps.md",
        "aaps-compact",
        "aaps-compact.json",
        aaps.compact_page,
        "aaps.py --hidden 256 --deltas 0 --plain --compact 0.05 --seeds 5 --envs-per-worker 8 "
        "--steps 1000000 --out benchmarks/results/aaps-compact.json",
    ),
    Section(DOCS / "aaps.md", "aaps-cartpole", "aaps-cartpole.json", aaps_cartpole.page, "aaps_cartpole.py"),
    Section(DOCS / "aaps.md", "aaps-large", "aaps-large.json", aaps.summary),
    Section(DOCS / "aaps.md", "aaps", "aaps.json", aaps.summary),
    Section(DOCS / "stagger.md", "stagger-chain", "stagger.json", stagger.chain_summary),
    Section(DOCS / "stagger.md", "stagger-pendulum", "stagger.json", stagger.pendulum_summary),
)


@dataclass(frozen=True)
class Plots:
    """Plots under docs/images that are drawn from one file under results/."""

    results: str
    draw: Callable[[dict[str, Any], Path], object]
    images: tuple[str, ...]


def stagger_plots(document: dict[str, Any], _: Path) -> None:
    """Draw into docs/images, whatever the folder argument is."""
    for draw in (stagger.draw_matrices, stagger.draw_accuracy, stagger.draw_returns):
        draw(document["curves"])


PLOTS = (
    Plots("throughput.json", speed_plot.draw, ("speed.png",)),
    Plots("defaults.json", defaults.draw, tuple(f"defaults-{learner}.png" for learner in defaults.LEARNERS)),
    Plots("learning.json", learning_tables.draw, ("learning-cartpole-v1.png", "learning-lunarlander-v3.png")),
    Plots("offpolicy.json", offpolicy_tables.draw, ("offpolicy-pendulum-v1.png",)),
    Plots(OFFPOLICY_16, offpolicy_tables.draw, ("offpolicy-lunarlander-v3.png", "offpolicy-halfcheetah-v5.png")),
    Plots("aride.json", aride_tables.draw, ("aride-success.png",)),
    Plots("async-16-cores.json", async_tables.draw, ("async-returns.png", "async-staleness.png")),
    Plots("async-lunarlander.json", async_return.draw, ("async-lunarlander.png",)),
    Plots("elastic.json", elastic_tables.draw, (elastic_tables.SLOTS_IMAGE,)),
    Plots("elastic-batch.json", elastic_tables.draw, (elastic_tables.BATCH_IMAGE,)),
    *(
        Plots(f"{name}.json", partial(aaps.draw, name), (f"{name}-returns.png", f"{name}-pulls.png"))
        for name in ("aaps-ppo", "aaps", "aaps-large")
    ),
    Plots(
        "stagger-curves.json", stagger_plots, ("stagger-forgetting.png", "stagger-accuracy.png", "stagger-pendulum.png")
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if a table differs")
    parser.add_argument("--plots", action="store_true", help="also draw all plots; needs matplotlib")
    options = parser.parse_args()
    for plots in PLOTS if options.plots else ():
        if (path := RESULTS / plots.results).exists():
            plots.draw(json.loads(path.read_text()), IMAGES)
            print(f"drawn: {', '.join(plots.images)}")
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
