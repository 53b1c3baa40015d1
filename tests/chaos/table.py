"""The table at the end of a run."""

from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.judge import Result


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and the most of some sorted values; empty if there are none."""
    if not values:
        return {}
    at = {"p50": 0.5, "p99": 0.99}
    found = {name: values[min(len(values) - 1, int(len(values) * q))] for name, q in at.items()}
    return {"count": len(values), **found, "max": values[-1]}


def show(console: Console, result: Result, told: dict[str, Any]) -> None:
    """Print what a run says."""
    table = Table(
        title=f"{told['title']} on {told['server']}, seed {told['seed']}", show_header=False
    )
    table.add_column(style="bold")
    table.add_column()
    table.add_row("jobs", f"{result.jobs:,} tried, {result.confirmed:,} confirmed, "
                          f"{result.refused:,} refused, {result.unknown:,} unknown "
                          f"({result.recovered:,} of them added)")  # fmt: skip
    table.add_row("done", f"{result.completed:,} completed, {result.dead:,} dead as planned, "
                          f"in {result.seconds:,.0f} s")  # fmt: skip
    kinds = "\n".join(f"{count} of {kind!r}" for kind, count in result.faults.items())
    table.add_row(f"{sum(result.faults.values())} faults of {len(result.faults)} kinds", kinds)
    table.add_row("workers that ended by themselves", f"{result.deaths:,}")
    for name in ("lost", "unexpected", "stuck", "doubled", "buried_wrongly", "uncaused"):
        count = getattr(result, name)
        shown = f"[red]{count:,} {result.examples.get(name, '')}[/]" if count else "[green]0[/]"
        table.add_row(name.replace("_", " "), shown)
    bound = "unknown" if result.extra_bound is None else f"{result.extra_bound:,}"
    table.add_row("extra runs", f"{result.extra_runs:,} (bound: {bound}; "
                                f"{result.overlapping:,} ran in two places at once)")  # fmt: skip
    table.add_row("jobs of a lost worker begun elsewhere", _times(result.taken_over_s))
    table.add_row("next job done after a fault", _times(result.resumed_s))
    for name, key in (("RSS of workers, MB", "rss_mb"), ("open files of workers", "fds"),
                      ("memory of the server, MB", "server_mb")):  # fmt: skip
        table.add_row(name, f"{result.before[key]} → {result.after[key]}")
    console.print(table)
    for violation in result.violations:
        console.print(f"[red]✗ {violation}[/]", soft_wrap=True)
    if not result.violations:
        console.print("[green]✓ nothing is wrong[/]")


def _times(values: list[float]) -> str:
    found = quantiles(values)
    if not found:
        return "none"
    shown = ", ".join(f"{name} {found[name]:.2f} s" for name in ("p50", "p99", "max"))
    return f"{shown} ({found['count']} cases)"
