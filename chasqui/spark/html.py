"""The report as one HTML page: inline SVG and CSS, no script, nothing fetched from anywhere."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import Any, Final

_WIDTH, _HEIGHT = 960, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 26
_COLORS: Final = ("#2563eb", "#d97706", "#dc2626", "#059669", "#7c3aed")

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1000px;padding:0 1rem;
color:#111827;background:#fff}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .4rem}
p.sub{color:#6b7280;margin:.2rem 0 1rem}svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:#6b7280}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(120px,1fr));gap:.6rem}
.tile{border:1px solid #e5e7eb;border-radius:6px;padding:.5rem .7rem}
.tile b{display:block;font-size:1.25rem}.tile span{color:#6b7280;font-size:.8rem}
table{border-collapse:collapse;width:100%;font-size:.85rem}
td,th{text-align:left;padding:.25rem .5rem;border-bottom:1px solid #e5e7eb;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
code{font-size:.8rem;word-break:break-word}.bar{background:#dbeafe;height:.8rem;display:inline-block}
.legend{font-size:.8rem;color:#374151}.legend i{display:inline-block;width:.8rem;height:.8rem;
margin:0 .3rem 0 .9rem;vertical-align:-1px}
"""


def page(report: dict[str, Any]) -> str:
    """The page of a report."""
    if not report["events"]:
        body = "<h1>chasqui</h1><p>No events in this time.</p>"
        return _document(body)
    sections = [
        _heading(report),
        _tiles(report["totals"]),
        _section("Throughput", "jobs a second", _throughput(report)),
        _section("Wait", "from ready to started, milliseconds", _percentiles(report, "wait_ms", 1)),
        _section("Run time", "milliseconds", _percentiles(report, "run_us", 1000)),
        _section("Durations", "runs by time and length; darker is more", _heat(report)),
        _section("Retries", "jobs by attempts needed and outcome", _funnel(report["funnel"])),
        _section("Failures", "grouped by masked reason", _signatures(report["signatures"])),
        _section("Slowest names", "by 95th percentile of run time", _names(report["names"])),
        _section("Dead-letter queue", "jobs by reason", _dead(report["dlq"])),
    ]
    return _document("".join(sections))


def _document(body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>chasqui report</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _heading(report: dict[str, Any]) -> str:
    queues = ", ".join(escape(name) for name in report["queues"])
    first, last = report["first"][:19], report["last"][:19]
    return (
        f"<h1>{queues}</h1><p class=sub>{first} to {last} UTC, {report['events']:,} events, "
        f"windows of {report['window_s']:,} s</p>"
    )


def _section(title: str, what: str, content: str) -> str:
    return f"<h2>{title}</h2><p class=sub>{what}</p>{content or '<p>None.</p>'}"


def _tiles(totals: dict[str, Any]) -> str:
    shown = [(name.replace("_", " "), f"{totals[name] or 0:,}") for name in (
        "started", "completed", "failed", "retried", "dead_lettered")]  # fmt: skip
    for label, name, scale in (
        ("run p50", "run_us_p50", 1000),
        ("run p99", "run_us_p99", 1000),
        ("wait p99, with delays", "wait_ms_p99", 1),
    ):
        value = totals.get(name)
        shown.append((label, "-" if value is None else f"{value / scale:,.1f} ms"))
    tiles = "".join(
        f"<div class=tile><b>{value}</b><span>{escape(label)}</span></div>"
        for label, value in shown
    )
    return f"<div class=tiles>{tiles}</div>"


# ── Plots ───────────────────────────────────────────────────────────────────────────────────────


def _throughput(report: dict[str, Any]) -> str:
    rows, window_s = report["timeline"], report["window_s"]
    series = {
        name: [(row["start"], (row[name] or 0) / window_s) for row in rows]
        for name in ("completed", "retried", "failed")
    }
    return _lines(series, report)


def _percentiles(report: dict[str, Any], kind: str, scale: int) -> str:
    series = {}
    for name in ("p50", "p95", "p99"):
        points = [(row["start"], row.get(f"{kind}_{name}")) for row in report["timeline"]]
        series[name] = [(start, value / scale) for start, value in points if value is not None]
    return _lines(series, report) if any(series.values()) else ""


def _lines(series: dict[str, list[tuple[str, float]]], report: dict[str, Any]) -> str:
    most = max((value for points in series.values() for _, value in points), default=0) or 1
    x_of, _ = _scale(report)
    parts = [_axes(most, report)]
    for color, points in zip(_COLORS, series.values(), strict=False):
        path = " ".join(f"{x_of(start):.1f},{_y(value, most):.1f}" for start, value in points)
        if len(points) == 1:
            start, value = points[0]
            parts.append(
                f'<circle cx="{x_of(start):.1f}" cy="{_y(value, most):.1f}" r="3" fill="{color}"/>'
            )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    return _svg(parts) + _legend(series)


def _heat(report: dict[str, Any]) -> str:
    cells = report["heat"]
    if not cells:
        return ""
    low = min(cell["log2_us"] for cell in cells)
    high = max(cell["log2_us"] for cell in cells)
    most = max(cell["runs"] for cell in cells)
    x_of, width = _scale(report)
    height = (_HEIGHT - _TOP - _BOTTOM) / (high - low + 1)
    parts = []
    for cell in cells:
        strength = 0.12 + 0.88 * (cell["runs"] / most) ** 0.5
        y = _TOP + (high - cell["log2_us"]) * height
        label = f"{cell['start'][11:19]}, {_duration(2 ** cell['log2_us'])}: {cell['runs']:,} runs"
        parts.append(
            f'<rect x="{x_of(cell["start"]):.1f}" y="{y:.1f}" width="{max(1, width - 1):.1f}" '
            f'height="{max(1, height - 1):.1f}" fill="#2563eb" fill-opacity="{strength:.2f}">'
            f"<title>{label}</title></rect>"
        )
    every = max(1, (high - low + 1) // 6)
    for bucket in range(low, high + 1, every):
        y = _TOP + (high - bucket + 0.7) * height
        text = _duration(2**bucket)
        parts.append(f'<text x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">{text}</text>')
    parts.append(_times(report))
    return _svg(parts)


def _scale(report: dict[str, Any]) -> tuple[Any, float]:
    """Where a moment is on the x axis, and how wide a window is."""
    first = datetime.fromisoformat(report["timeline"][0]["start"])
    last = datetime.fromisoformat(report["timeline"][-1]["start"])
    windows = max(1, round((last - first).total_seconds() / report["window_s"])) + 1
    width = (_WIDTH - _LEFT - _RIGHT) / windows

    def x_of(start: str) -> float:
        passed_s = (datetime.fromisoformat(start) - first).total_seconds()
        place: float = _LEFT + passed_s / report["window_s"] * width
        return place

    return x_of, width


def _y(value: float, most: float) -> float:
    return _HEIGHT - _BOTTOM - value / most * (_HEIGHT - _TOP - _BOTTOM)


def _axes(most: float, report: dict[str, Any]) -> str:
    parts = []
    for i in range(5):
        value = most * i / 4
        y = _y(value, most)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="#e5e7eb"/><text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{_short(value)}</text>"
        )
    return "".join(parts) + _times(report)


def _times(report: dict[str, Any]) -> str:
    rows = report["timeline"]
    x_of, _ = _scale(report)
    chosen = rows[:: max(1, len(rows) // 6)]
    return "".join(
        f'<text x="{x_of(row["start"]):.1f}" y="{_HEIGHT - 8}">{row["start"][11:19]}</text>'
        for row in chosen
    )


def _svg(parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _legend(series: Iterable[str]) -> str:
    items = "".join(
        f'<i style="background:{color}"></i>{escape(name)}'
        for color, name in zip(_COLORS, series, strict=False)
    )
    return f"<p class=legend>{items}</p>"


# ── Tables ──────────────────────────────────────────────────────────────────────────────────────


def _table(columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]]) -> str:
    """Columns are names, with True for numbers; cells are HTML already."""
    head = "".join(f"<th{' class=n' if number else ''}>{name}</th>" for name, number in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=n' if number else ''}>{cell}</td>"
            for cell, (_, number) in zip(row, columns, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>" if body else ""


def _funnel(rows: list[dict[str, Any]]) -> str:
    most = max((row["jobs"] for row in rows), default=1)
    columns = (("attempts", True), ("outcome", False), ("jobs", True), ("", False))
    return _table(
        columns,
        (
            (
                str(row["attempts"]),
                escape(row["outcome"]),
                f"{row['jobs']:,}",
                f'<span class=bar style="width:{300 * row["jobs"] / most:.0f}px"></span>',
            )
            for row in rows
        ),
    )


def _signatures(rows: list[dict[str, Any]]) -> str:
    columns = [("failures", True), ("signature", False), ("reason, masked", False)]
    columns += (("names", False), ("last seen", False), ("samples", False))
    return _table(
        columns,
        (
            (
                f"{row['failures']:,}",
                f"<code>{escape(row['signature'])}</code>",
                f"<code>{escape(row['masked_reason'])}</code>",
                escape(", ".join(row["names"])),
                escape(str(row["last_seen"])[:19]),
                "<code>" + escape(", ".join(row["sample_ids"][:3])) + "</code>",
            )
            for row in rows
        ),
    )


def _names(rows: list[dict[str, Any]]) -> str:
    columns = [("name", False), ("queue", False), ("completed", True), ("failed", True)]
    columns += (("p50 ms", True), ("p95 ms", True), ("p99 ms", True))
    return _table(
        columns,
        (
            (
                escape(row["name"] or "(unnamed)"),
                escape(row["queue"]),
                f"{row['completed']:,}",
                f"{row['failed']:,}",
                *(_ms(row[f"run_us_{one}"]) for one in ("p50", "p95", "p99")),
            )
            for row in rows
        ),
    )


def _dead(rows: list[dict[str, Any]]) -> str:
    columns = (("jobs", True), ("queue", False), ("reason", False))
    return _table(
        columns,
        ((f"{row['jobs']:,}", escape(row["queue"]), escape(row["reason"] or "-")) for row in rows),
    )


def _ms(value_us: float | None) -> str:
    return "-" if value_us is None else f"{value_us / 1000:,.2f}"


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _duration(us: float) -> str:
    if us < 1000:
        return f"{us:.0f} us"
    return f"{us / 1000:.0f} ms" if us < 1_000_000 else f"{us / 1_000_000:.0f} s"
