"""The bar chart of the README: steps per second of farstep and its peers; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tables
from runner import Run, runs_in

NUM_ENVS = 64
NAMES = {
    "farstep-collect": "farstep collect",
    "farstep-collect-eager": "farstep collect, eager policy",
    "farstep-make_vec": "farstep make_vec",
    "pufferlib-sync": "PufferLib",
    "gymnasium-sync": "Gymnasium SyncVectorEnv",
    "torchrl-sync": "TorchRL",
    "rllib": "RLlib",
    "sample-factory": "Sample Factory",
    "sb3-subproc": "SB3 SubprocVecEnv",
    "gymnasium-async": "Gymnasium AsyncVectorEnv",
    "farstep-envpool-collect": "farstep collect, C++ environments",
    "envpool-sync": "EnvPool, C++ environments",
}
"""Contenders with their labels, top to bottom; the last two step EnvPool's environments."""
COMPILED = 2
LIMITS = {"limit-fast": ("limit, recorded policy", "-"), "limit-eager": ("limit, eager policy", ":")}


def draw(document: dict[str, Any], folder: Path) -> None:
    """Draw speed.png: a panel per environment, a bar per contender, the limits as vertical lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = runs_in(document, tables.Case.of)
    cases = [case for case in found if case.num_envs == NUM_ENVS and case.sampler == "eager"]
    figure, axes = plt.subplots(1, len(cases), figsize=(5.2 * len(cases), 4.6), layout="constrained", sharey=True)
    cores = document["machine"]["cores"]
    figure.suptitle(f"Steps per second, {NUM_ENVS} environments, {cores} cores", fontsize=12)
    for axis, case in zip(axes, cases, strict=True):
        draw_case(axis, case.env, found[case])
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(folder / "speed.png", dpi=100, metadata={"Software": None})
    plt.close(figure)


def draw_case(axis: Any, title: str, runs: Mapping[str, list[Run]]) -> None:
    """One panel."""
    rates = {name: rate.median for name, done in runs.items() if (rate := tables.rates_of(done))}
    names = [name for name in NAMES if name in rates]
    python = len(names) - COMPILED
    places = {name: i + 0.6 * (i >= python) for i, name in enumerate(names)}
    for label, color, own in (("farstep", "tab:blue", True), ("peers", "silver", False)):
        members = [name for name in names if name.startswith("farstep") is own]
        bars = axis.barh([places[name] for name in members], [rates[name] for name in members], color=color)
        bars.set_label(label)
        texts = axis.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=8)
        for text in texts:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    for name, (label, style) in LIMITS.items():  # for Python environments only
        axis.vlines(rates[name], -0.6, python - 0.4, color="black", linestyle=style, linewidth=1, label=label, zorder=0)
    axis.set_yticks([*places.values()], [NAMES[name] for name in names], fontsize=9)
    axis.set_title(title, fontsize=10)
    axis.locator_params(axis="x", nbins=5)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlim(right=1.15 * max(rates[name] for name in [*names, *LIMITS]))
    axis.spines[["top", "right"]].set_visible(False)
