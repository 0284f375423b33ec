"""Plots: grouping and averaging of runs, and the figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farstep.errors import ConfigError, RunError
from farstep.observe.curves import Run, read_groups, smoothed, stacked
from farstep.observe.loggers import JsonlLogger
from farstep.observe.plots import plot
from farstep.observe.run_folder import RunFolder

if importlib.util.find_spec("matplotlib") is None:  # imported when a test needs it, not by every process
    pytest.skip("pip install 'farstep[plot]'", allow_module_level=True)


def make_run(root: Path, name: str = "run", updates: int = 30, scale: float = 1.0, **config: object) -> Path:
    run = RunFolder.create(root, name, {"algorithm": "ppo", "env": {"env_name": "CartPole-v1"}, **config})
    logger = JsonlLogger(run.metrics_file)
    for update in range(1, updates + 1):
        metrics = {
            "seconds": update * 60.0,
            "env/return_mean": scale * update if update > 1 else float("nan"),
            "rate/steps_per_second": 8000.0,
            "lag/versions_mean": 0.5,
            "lag/versions_max": 1.0,
        }
        logger.log(update * 1000, metrics | ({"eval/return_mean": scale * update} if update % 10 == 0 else {}))
    logger.close()
    return run.path


def as_drawn(monkeypatch) -> list:
    """The figures that are saved from now on."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig

    def keep(self, *args, **options):
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_runs_that_differ_by_seed_are_one_group(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, seed=seed, learner={"seed": seed, "gamma": 0.9}) for seed in (1, 2, 3)]
    other = make_run(tmp_path, algorithm="async-ppo", seed=1, staleness_threshold=1, learner={"gamma": 0.9})
    groups = read_groups([*runs, other])
    assert [group.label for group in groups] == ["ppo (3 seeds)", "async-ppo"]
    assert [len(group.runs) for group in groups] == [3, 1]
    assert read_groups([runs[0], runs[0]])[0].label == "mean of 2 runs"


def test_labels_name_the_options_that_differ(tmp_path: Path) -> None:
    def labels(*configs: dict[str, Any]) -> list[str]:
        runs = [make_run(tmp_path, "r", updates=1, **config) for config in configs]
        return [group.label for group in read_groups(runs)]

    assert labels({"seed": 1, "a": {"gamma": 0.9}}, {"seed": 2, "a": {"gamma": 0.99}}) == ["gamma=0.9", "gamma=0.99"]
    assert labels({"algorithm": "dqn", "lr": 1}, {"algorithm": "sac", "lr": 1}) == ["dqn", "sac"]
    assert labels({"algorithm": "dqn", "lr": 1}, {"algorithm": "dqn", "lr": 2}, {"algorithm": "sac", "lr": 2}) == [
        "dqn, lr=1",
        "dqn, lr=2",
        "sac, lr=2",
    ]
    many = [dict.fromkeys("abcdef", number) for number in (1, 2)]
    assert labels(*many) == ["r-8", "r-9"]  # numbered on from the runs above


def test_the_average_is_over_the_steps_that_all_runs_have() -> None:
    short = (np.array([10.0, 20.0]), np.array([1.0, 2.0]))
    long = (np.array([0.0, 15.0, 30.0]), np.array([0.0, 3.0, 6.0]))
    grid, values = stacked([short, long])
    assert grid.tolist() == [10.0, 15.0, 20.0]
    np.testing.assert_allclose(values, [[1.0, 1.5, 2.0], [2.0, 3.0, 4.0]])
    apart = (np.array([40.0, 50.0]), np.array([0.0, 0.0]))
    assert stacked([short, apart])[1].shape == (2, 0)


@pytest.mark.parametrize("updates", [1, 2, 3, 6, 7, 50])
def test_smoothing_is_the_mean_of_the_neighbors(updates: int) -> None:
    ys = np.random.default_rng(1).normal(size=11)
    half = min(updates, 11) // 2
    expected = [ys[max(i - half, 0) : i + half + 1].mean() for i in range(11)]
    np.testing.assert_allclose(smoothed((np.arange(11.0), ys), updates)[1], expected)


@pytest.mark.slow
def test_a_torn_line_and_a_clock_that_starts_again_are_tolerated(tmp_path: Path) -> None:
    path = make_run(tmp_path, updates=3)
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 4000, "seconds": 10.0, "env/return_mean": 4.0}) + '\n{"step": 5000, "sec')
    xs, ys = Run.read(path).curve("env/return_mean", "seconds")
    assert xs.tolist() == [120.0, 180.0, 180.0] and ys.tolist() == [2.0, 3.0, 4.0]
    assert plot([path], tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_plot_shows_return_throughput_and_staleness(tmp_path: Path, monkeypatch) -> None:
    figures = as_drawn(monkeypatch)
    runs = [make_run(tmp_path, seed=seed, scale=seed) for seed in (1, 2, 3)]
    out = plot(runs, tmp_path / "new" / "folder" / "a.png")
    assert out.read_bytes().startswith(b"\x89PNG") and len(list(out.parent.iterdir())) == 1
    by_steps, by_time, speed, lag = figures[0].axes
    assert [axes.get_title(loc="left") for axes in figures[0].axes] == [
        "Return",
        "Return over time",
        "Recent speed in steps/s",
        "Staleness in versions",
    ]
    assert by_steps.get_xlabel() == speed.get_xlabel() == lag.get_xlabel() == "environment steps"
    assert by_time.get_xlabel() == "wall-clock minutes"
    mean = max(by_steps.lines, key=lambda line: line.get_linewidth())
    np.testing.assert_allclose(mean.get_ydata(), np.arange(2, 31) * 2.0)
    [band] = by_steps.collections
    assert band.get_datalim(by_steps.transData).y0 == 2.0 and band.get_datalim(by_steps.transData).y1 == 90.0
    assert figures[0].get_suptitle() == "CartPole-v1 · ppo"
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [
        "mean of 3 seeds",
        "lowest to highest run",
    ]
    plot(runs, tmp_path / "b.png", band="std", title="mine")
    assert figures[1].get_suptitle() == "mine"
    assert figures[1].legends[0].get_texts()[-1].get_text() == "one standard deviation"


def test_one_run_needs_no_legend(tmp_path: Path, monkeypatch) -> None:
    figures = as_drawn(monkeypatch)
    plot([make_run(tmp_path, "only", updates=400)], tmp_path / "a.svg")
    assert not figures[0].legends and figures[0].get_suptitle() == "only"


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


@pytest.mark.slow
def test_metrics_without_data_have_no_panel(tmp_path: Path, monkeypatch) -> None:
    figures = as_drawn(monkeypatch)
    row: dict[str, float] = {"step": 5, "env/return_mean": 3.0, "lag/versions_mean": 0.0, "lag/versions_max": 0.0}
    more: list[dict[str, float]] = [{}, {"seconds": 2.0}, {"lag/versions_max": 1.0}, {"workers/restarts": 0}]
    more += [{"workers/restarts": 2}, {"dropped/stale": 4}]
    for position, metrics in enumerate(more):
        run = RunFolder.create(tmp_path, f"run{position}", {})
        run.metrics_file.write_text(json.dumps(row | metrics) + "\n")
        plot([run.path], tmp_path / "a.png")
    assert [titles(figure) for figure in figures] == [
        ["Return"],
        ["Return", "Return over time", "Recent speed in steps/s"],
        ["Return", "Staleness in versions"],
        ["Return"],
        ["Return", "Worker restarts so far"],
        ["Return", "Dropped chunks per update"],
    ]
    assert not any(axes.get_legend() for axes in figures[0].axes), "there was no evaluation"
    (tmp_path / "run0" / "metrics.jsonl").write_text('{"step": 5}\n')
    with pytest.raises(RunError, match=r"run0: no episode has ended.*nothing to plot"):
        plot([tmp_path / "run0"], tmp_path / "b.png")


def test_throughput_is_that_of_a_window(tmp_path: Path, monkeypatch) -> None:
    """A run that becomes four times as fast is drawn so, while the mean since its start has hardly changed."""
    run = RunFolder.create(tmp_path, "run", {})
    rows, seconds = [], 0.0
    for update in range(1, 121):
        seconds += 4.0 if update <= 100 else 1.0
        rows.append({"step": update * 1000, "seconds": seconds, "rate/steps_per_second": update * 1000 / seconds})
    rows.append({"step": 120_000, "seconds": seconds, "eval/return_mean": 1.0})
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    xs, ys = Run.read(run.path).speed(10)
    assert xs.tolist() == [update * 1000.0 for update in range(1, 121)]
    assert set(ys[:100]) == {250.0} and set(ys[109:]) == {1000.0}
    assert ys[104] == pytest.approx(10_000 / 25)
    figures = as_drawn(monkeypatch)
    plot([run.path], tmp_path / "a.png")
    *_, speed = figures[0].axes
    np.testing.assert_allclose(max(speed.lines, key=lambda line: line.get_linewidth()).get_ydata(), ys)


def test_evaluations_are_drawn_where_they_started(tmp_path: Path, monkeypatch) -> None:
    """An evaluation is logged when it finishes; training continued meanwhile."""
    run = RunFolder.create(tmp_path, "run", {})
    rows = [{"step": step, "seconds": step / 100, "env/return_mean": 0.0} for step in (1000, 2000, 3000)]
    rows[2] |= {"eval/step": 1500, "eval/return_mean": 7.0}
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = as_drawn(monkeypatch)
    plot([run.path], tmp_path / "a.png")
    by_steps, by_time, *_ = figures[0].axes
    dots = [[list(line.get_xdata()) for line in axes.lines if 7.0 in line.get_ydata()] for axes in (by_steps, by_time)]
    assert dots == [[[1500.0]], [[15.0]]]


def test_counters_are_drawn_as_increments(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run", {})
    rows: list[dict[str, float]] = [{}, {"dropped/stale": 2}, {"dropped/stale": 2, "dropped/cancelled": 3}, {}]
    rows += [{"dropped/stale": 1}]  # a resumed run counts from zero
    lines = [json.dumps({"step": step} | row) + "\n" for step, row in enumerate(rows)]
    run.metrics_file.write_text("".join(lines))
    assert Run.read(run.path).increase("dropped/")[1].tolist() == [0, 2, 3, 0, 0]


def test_runs_that_cannot_be_drawn_are_named(tmp_path: Path) -> None:
    out = tmp_path / "a.png"
    run = RunFolder.create(tmp_path, "empty", {})
    with pytest.raises(ConfigError, match="no run to plot"):
        plot([], out)
    with pytest.raises(RunError, match=r"emptyy does not exist; .*config\.json.*Runs in .*: empty"):
        plot([tmp_path / "emptyy"], out)
    with pytest.raises(RunError, match=r"metrics\.jsonl does not exist; the run has not reached its first update"):
        plot([run.path], out)
    run.metrics_file.write_text('{"step": 5, "env')
    with pytest.raises(RunError, match=r"metrics\.jsonl has no metrics"):
        plot([run.path], out)
    assert not out.exists()


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, updates=1)
    with pytest.raises(ConfigError, match=r"expected a name that ends in \.png"):
        plot([run], tmp_path / "a.jpeg")
    with pytest.raises(ConfigError, match="expected 'range' or 'std'"):
        plot([run], tmp_path / "a.png", band="min")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        plot([run], tmp_path / "a.png", smooth=0)


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        plot([make_run(tmp_path, updates=1)], tmp_path / "a.png")


def test_axes_have_short_numbers(tmp_path: Path, monkeypatch) -> None:
    figures = as_drawn(monkeypatch)
    plot([make_run(tmp_path)], tmp_path / "a.png")
    by_steps, _, speed, _ = figures[0].axes
    for axis in (by_steps.xaxis, speed.xaxis, speed.yaxis):
        written = axis.get_major_formatter().format_ticks([0, 500, 2000, 1.5e6, 2e9])
        assert written == ["0", "500", "2k", "1.5M", "2G"]


@pytest.mark.slow
def test_ticks_of_the_time_axis_are_round(tmp_path: Path, monkeypatch) -> None:
    figures = as_drawn(monkeypatch)
    minute, hour = 60, 3600
    for seconds in (4.2 * minute, 6 * minute, 7.2 * minute, 18 * minute, 360 * hour):
        run = RunFolder.create(tmp_path, "run", {})
        rows = [{"step": 1, "seconds": share * seconds, "env/return_mean": 0.0} for share in (0.5, 1.0)]
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        plot([run.path], tmp_path / "a.png")
    steps = [np.diff(figure.axes[1].get_xticks())[0] for figure in figures]
    np.testing.assert_allclose(steps, [1 * minute, 1 * minute, 2 * minute, 5 * minute, 100 * hour])
