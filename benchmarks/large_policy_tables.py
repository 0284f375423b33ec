"""The results of large_policy.py and served_limit.py as tables."""

from __future__ import annotations

from statistics import median
from typing import Any

from document import machines
from tables import table

ENV_ALONE, POLICY_ON_CPU, POLICY_ON_GPU = "environments", "policy-cpu", "policy-cuda"
POLICY_ON_HALF, POLICY_IN_BF16 = "policy-half", "policy-bf16"
"""On the GPU, with half of the environments in a batch; the second one in bfloat16."""
POLICIES = (POLICY_ON_CPU, POLICY_ON_GPU, POLICY_ON_HALF, POLICY_IN_BF16)
LIMITS = (ENV_ALONE, *POLICIES)
"""Names of the cases that measure limits."""
VISUAL = ("ViT-S", "ViT-tiny")
"""Sizes whose environments return images."""
CONTENDERS = {
    "local-cpu": "local, CPU",
    "local-cuda": "local, GPU",
    "served-cpu": "served, CPU",
    "served-cuda": "served, GPU",
    "served-bf16": "served, GPU, bfloat16",
    "vec-cpu": "make_vec, CPU",
    "vec-cuda": "make_vec, GPU",
}


def env_case(size: str) -> tuple[str, str]:
    """The case that measures the environments of a size: once for all sizes with the same environments."""
    return VISUAL[0] if size in VISUAL else "10k", ENV_ALONE


def limiting_policies(name: str) -> tuple[str, ...]:
    """The cases that measure a policy alone; the fastest of them limits the contender."""
    own = {"served-cuda": (POLICY_ON_HALF,), "served-bf16": (POLICY_IN_BF16,)}
    return own.get(name, (POLICY_ON_CPU, POLICY_ON_GPU))


def rates_of(runs: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Median steps per second of the cases that could be measured, by size and contender."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run["steps_per_second"]:
            found.setdefault((run["size"], run["contender"]), []).append(run["steps_per_second"])
    return {case: median(rates) for case, rates in found.items()}


def limit_of(rates: dict[tuple[str, str], float], size: str, name: str) -> float | None:
    """The smaller one of environments alone and the policy alone; None if one of them was not measured."""
    found = [rates[size, policy] for policy in limiting_policies(name) if (size, policy) in rates]
    return min(rates[env_case(size)], max(found)) if found and env_case(size) in rates else None


def described(runs: list[dict[str, Any]], run: dict[str, Any]) -> str:
    """One line about one case."""
    found, size, name = run["steps_per_second"], run["size"], run["contender"]
    if found is None:
        return f"{size:8} {name:13} {run['reason']}"
    limit = None if name in LIMITS else limit_of(rates_of(runs), size, name)
    share = f", {found / limit:.2f} of the limit" if limit else ""
    return f"{size:8} {name:13} {found:10,.0f} steps/s{share}"


def page(document: dict[str, Any]) -> str:
    """Steps per second of all contenders, and their shares of the limit in brackets; with the settings of the last
    run."""
    last = document["runs"][-1]
    settings = {name: last[name] for name in ("workers", "envs", "seconds")}
    runs = [run for run in document["runs"] if run.items() >= settings.items()]
    rates = rates_of(runs)
    parameters: dict[str, int] = {}
    for run in runs:
        parameters[run["size"]] = max(run.get("parameters", 0), parameters.get(run["size"], 0))
    sizes = sorted(parameters, key=lambda size: (size in VISUAL, parameters[size]))
    rows = []
    for name, label in {ENV_ALONE: "environments alone", **CONTENDERS}.items():
        cells = [_cell(rates, size, name) for size in sizes]
        if any(cells):
            rows.append([label, *cells])
    return table(["inference", *sizes], rows)


def _cell(rates: dict[tuple[str, str], float], size: str, name: str) -> str:
    if name == ENV_ALONE:
        found = rates.get(env_case(size))
        return f"{found:,.0f}" if found else ""
    if (found := rates.get((size, name))) is None:
        return ""
    limit = limit_of(rates, size, name)
    return f"{found:,.0f} ({found / limit:.2f})" if limit else f"{found:,.0f}"


def served_fraction(run: dict[str, Any]) -> float:
    """Steps per second with served inference divided by the limit of the same round."""
    return float(run["served"] / min(run["environments"], run["policy"]))


def served_page(document: dict[str, Any]) -> str:
    """Medians of the rounds of served_limit.py, with the ranges of the fractions; of the settings of the last run."""
    last = document["runs"][-1]
    settings = {name: last[name] for name in ("workers", "window", "device")}
    runs = [run for run in document["runs"] if run.items() >= settings.items()]
    rows, rounds = [], set[int]()
    for size, num_envs, dtype in dict.fromkeys((run["size"], run["envs"], run["dtype"]) for run in runs):
        own = [run for run in runs if (run["size"], run["envs"], run["dtype"]) == (size, num_envs, dtype)]
        rounds.add(len(own))
        speeds = [f"{median(run[name] for run in own):,.0f}" for name in ("environments", "policy", "served")]
        found = [served_fraction(run) for run in own]
        share = f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        batch_size = f"{median(run['batch_size'] for run in own):.0f}"
        rows.append([f"{size}, {dtype}", str(num_envs), *speeds, share, batch_size])
    counts = " to ".join(map(str, sorted({min(rounds), max(rounds)})))
    setting = (
        f"{last['workers']} workers, {machines(document)}; steps per second, medians of {counts} rounds with windows "
        f"of {last['window']:g} s. In brackets: the lowest and the highest fraction of any round "
        "(`results/served-limit.json`):"
    )
    header = ["policy", "environments", "environments alone", "policy alone", "served", "of the limit", "rows per call"]
    return f"{setting}\n\n{table(header, rows)}"


LINK_ROWS = {
    "environments": "environments alone",
    "link": "what the link allows, if each observation crosses it twice",
    "local": "local inference over the link",
    "served": "served inference at the head",
}
"""Labels of what is measured over a link."""


def link_fraction(run: dict[str, Any], name: str) -> float:
    """Steps per second divided by the limit of the same round: the smaller one of environments alone and the link."""
    return float(run[name] / min(run["environments"], run["link"]))


def link_described(run: dict[str, Any]) -> str:
    """One line about one round."""
    speeds = ", ".join(f"{name} {run[name]:,.0f}" for name in LINK_ROWS)
    return f"steps/s: {speeds}; served {link_fraction(run, 'served'):.2f} of the limit"


def link_page(document: dict[str, Any]) -> str:
    """Setting and table of served inference over a link; of the rounds with the settings of the last one."""
    last = document["runs"][-1]
    settings = {name: last[name] for name in ("workers", "envs", "steps", "seconds", "mbit", "obs_bytes")}
    runs = [run for run in document["runs"] if run.items() >= settings.items()]
    rounds = f"{len(runs)} round{'s' if len(runs) > 1 else ''}"
    setting = (
        f"{last['envs']} environments on {last['workers']} workers, a link of {last['mbit']:g} Mbit/s, observations of "
        f"{last['obs_bytes']:,} bytes, {machines(document)}; medians of {rounds} of {last['seconds']:g} s (lowest to "
        "highest). The limit of served inference is the lower one of the first two rows. Local inference "
        "can exceed it, because it sends each observation only once (`results/served-link.json`):"
    )
    rows = []
    for name, label in LINK_ROWS.items():
        speeds = [run[name] for run in runs]
        fractions = [link_fraction(run, name) for run in runs]
        shares = f"{median(fractions):.2f} ({min(fractions):.2f} to {max(fractions):.2f})"
        speed = f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        rows.append([label, speed, shares if name in ("local", "served") else ""])
    return f"{setting}\n\n{table(['', 'steps per second', 'of the limit'], rows)}"
