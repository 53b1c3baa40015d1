"""Draws what a run found: bars with their spread, distributions, and how cost grows."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib

from bench.libraries import LIBRARIES
from bench.results import Results, first
from bench.scenarios import SCENARIOS, Scenario

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

OURS, THEIRS, LIMIT = "#d1495b", "#8d99ae", "#2b2d42"
LINES = (
    *("#30638e", "#edae49", "#00798c", "#8d6a9f", "#6c757d", "#7fb069", "#bc6c25", "#3d348b"),
    *("#e07a9b", "#1b998b", "#a3a948", "#577590"),
)
#: Scenarios whose rate is not what they are for.
NO_RATE = ("memory", "memory_1m")


def draw(results: Results, out: Path) -> dict[str, Path]:
    """Write a PNG for each thing that was measured; their paths by name."""
    made: dict[str, Path] = {}
    for scenario in SCENARIOS:
        names = [name for name in results.libraries() if results.runs(name, scenario.name, "rate")]
        if len(names) > 1 and scenario.name not in NO_RATE:
            made[scenario.name] = _bars(results, scenario, names, out)
        if any("quantiles_ms" in row for row in results.rows if row["scenario"] == scenario.name):
            made[scenario.name] = _distributions(results, scenario, out)
    for varies in ("jobs", "bytes"):
        if any(row.get("varies") == varies for row in results.rows):
            made[f"growth_{varies}"] = _growth(results, varies, out)
    if any("rss_mb_over_time" in row for row in results.rows):
        made["memory_1m"] = _memory(results, out)
    if overview := _overview(results, out):
        made["overview"] = overview
    return made


def _bars(results: Results, scenario: Scenario, names: list[str], out: Path) -> Path:
    """Jobs a second of each library, the fastest on top; whiskers from worst to best."""
    values = {name: results.value(name, scenario.name, "rate") for name in names}
    order = sorted(names, key=lambda name: values[name].best)  # type: ignore[union-attr]
    with _figure(out, scenario.name, 0.32 * len(order) + 1.1) as axes:
        for i, name in enumerate(order):
            value = values[name]
            assert value is not None
            axes.barh(i, value.best, height=0.68, color=_colour(name))
            axes.plot([value.low, value.high], [i, i], color="#111", linewidth=1.2)
            axes.annotate(f" {value.best:,.0f}", (value.best, i), va="center", fontsize=8)
        axes.set_yticks(range(len(order)), [_title(name) for name in order])
        axes.set_xscale("log")
        lowest = min(value.low for value in values.values() if value is not None)
        axes.set_xlim(10 ** math.floor(math.log10(lowest)), axes.get_xlim()[1] * 2.2)
        _plain_ticks(axes)
        axes.set_title(f"{scenario.title}: jobs a second, logarithmic", loc="left", fontsize=10)
    return out / f"{scenario.name}.png"


def _distributions(results: Results, scenario: Scenario, out: Path) -> Path:
    """Milliseconds up to each percentile; the best run of each library."""
    with _figure(out, scenario.name, 3.6) as axes:
        for i, name in enumerate(results.libraries()):
            run = first(
                results.runs(name, scenario.name, "quantiles_ms"), lambda row: row["p50_ms"]
            )
            if run is None:
                continue
            heights = [max(ms, 0.05) for ms in run["quantiles_ms"]]
            width = 2.4 if name == "chasqui" else 1.2
            colour = OURS if name == "chasqui" else LINES[i % len(LINES)]
            axes.plot(range(101), heights, label=_title(name), linewidth=width, color=colour)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.set_xlabel("percent of jobs that took at most so long")
        axes.set_title(f"{scenario.title}: milliseconds", loc="left", fontsize=10)
        axes.legend(fontsize=7, frameon=False, ncols=2)
    return out / f"{scenario.name}.png"


def _growth(results: Results, varies: str, out: Path) -> Path:
    """Microseconds a job, as there are more or larger ones."""
    with _figure(out, f"growth_{varies}", 3.4) as axes:
        rows = [row for row in results.rows if row.get("varies") == varies]
        for i, way in enumerate(dict.fromkeys(row["scenario"].split()[0] for row in rows)):
            points = []
            for at in sorted({row["at"] for row in rows}):
                rate = results.value("chasqui", f"{way} {varies}={at}", "rate")
                if rate is not None:
                    points.append((at, 1e6 / rate.best))
            axes.plot(*zip(*points, strict=True), marker="o", label=way, color=LINES[i])
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain_ticks(axes)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
        axes.set_xlabel("jobs" if varies == "jobs" else "bytes of payload")
        axes.set_title("chasqui: microseconds a job", loc="left", fontsize=10)
        axes.legend(fontsize=8, frameon=False)
    return out / f"growth_{varies}.png"


def _memory(results: Results, out: Path) -> Path:
    with _figure(out, "memory_1m", 2.8) as axes:
        for i, name in enumerate(results.libraries()):
            for scenario in ("memory_1m", "memory"):
                runs = results.runs(name, scenario, "rss_mb_over_time")
                if runs:
                    seen = runs[-1]["rss_mb_over_time"]
                    part = runs[-1]["n"] / len(seen)
                    jobs = [part * (j + 1) for j in range(len(seen))]
                    label = f"{_title(name)}, {runs[-1]['n']:,} jobs"
                    axes.plot(jobs, seen, label=label, color=LINES[i % len(LINES)])
                    break
        axes.set_ylim(bottom=0)
        axes.set_xscale("log")
        _plain_ticks(axes)
        axes.set_xlabel("jobs run")
        axes.set_title("a worker's memory: MB", loc="left", fontsize=10)
        axes.legend(fontsize=8, frameon=False)
    return out / "memory_1m.png"


def _overview(results: Results, out: Path) -> Path | None:
    """How many times as fast as each library we are, scenario by scenario."""
    rows = []
    for scenario in SCENARIOS:
        if scenario.name in NO_RATE:
            continue
        found = {}
        for name in results.libraries():
            ratio = results.ratio(scenario.name, "rate", name) if name != "chasqui" else None
            if ratio is not None:
                found[name] = ratio.best
        if found:
            rows.append((scenario, found))
    if not rows:
        return None
    names = [name for name in LIBRARIES if any(name in found for _, found in rows)]
    with _figure(out, "overview", 0.36 * len(rows) + 1.6) as axes:
        for k, name in enumerate(names):
            points = [
                (found[name], i) for i, (_, found) in enumerate(reversed(rows)) if name in found
            ]
            is_limit = name in ("limit", "floor", "redis_benchmark")
            axes.plot(
                *zip(*points, strict=True),
                linestyle="",
                label=_title(name),
                marker="D" if is_limit else "o",
                markersize=4 if is_limit else 5,
                color=LIMIT if name == "limit" else LINES[k % len(LINES)],
            )
        axes.axvline(1, color="#111", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [scenario.title for scenario, _ in reversed(rows)])
        axes.set_xscale("log")
        _plain_ticks(axes)
        axes.set_title("chasqui's rate over each library's, logarithmic", loc="left", fontsize=10)
        axes.legend(
            fontsize=7, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.1)
        )
    return out / "overview.png"


@contextmanager
def _figure(out: Path, name: str, height: float) -> Iterator[Axes]:
    figure, axes = pyplot.subplots(figsize=(7.6, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", color="#e4e7ee", linewidth=0.6)
    axes.set_axisbelow(True)
    try:
        yield axes
        figure.savefig(out / f"{name}.png", dpi=100)
    finally:
        pyplot.close(figure)


def _plain_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _colour(name: str) -> str:
    return {"chasqui": OURS, "limit": LIMIT, "floor": LIMIT, "redis_benchmark": LIMIT}.get(
        name, THEIRS
    )


def _title(name: str) -> str:
    return LIBRARIES[name].title
