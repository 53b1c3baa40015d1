"""The report as one HTML page: inline SVG and CSS, no script, nothing fetched from anywhere."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any, Final

from chasqui.model.words import count, duration
from chasqui.spark.reporting import plots
from chasqui.spark.reporting.plots import Series, Timeline

#: The most losses that get a sentence each.
_MOST_LOSSES: Final = 5
_SAMPLES: Final = 3
_ID_CHARS: Final = 60
_DEAD_NAME: Final = "dead-lettered"


def page(report: dict[str, Any]) -> str:
    """The page of a report."""
    parts = [_heading(report), _notes(report)]
    if report["events"]:
        parts += (_tiles(report), *_plots(report), *_tables(report))
    parts.append(_dead(report))
    if report["events"]:
        parts.append(_numbers(report))
    return _document(", ".join(report["queues"]) or "chasqui", "".join(parts))


def _document(title: str, body: str) -> str:
    style = (resources.files(__package__) / "report.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}: '
        'report</title><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{style}</style></head><body>{body}</body></html>\n"
    )


def _heading(report: dict[str, Any]) -> str:
    queues = ", ".join(escape(name) for name in report["queues"]) or "chasqui"
    if not report["events"]:
        since = f" since {_moment(report['since'])} UTC" if report["since"] else ""
        return f"<h1>{queues}</h1><p class=soft>No events{since}.</p>"
    return (
        f"<h1>{queues}</h1><p class=soft>{_between(report['first'], report['last'])} UTC, "
        f"{count(report['events'], 'event')}. Made {_moment(report['made'])}.</p>"
    )


# ── What is missing ─────────────────────────────────────────────────────────────────────────────


def _notes(report: dict[str, Any]) -> str:
    notes = "".join(f"<p>{escape(one)}</p>" for one in missing(report))
    return f"<div class=note role=note>{notes}</div>" if notes else ""


def missing(report: dict[str, Any]) -> list[str]:
    """Which events a report lacks, in sentences."""
    return [*_horizon(report), *_losses(report)]


def _horizon(report: dict[str, Any]) -> Iterable[str]:
    """Queues whose events do not go back to `since`, or to their first event."""
    since, names = report["since"], len(report["kept"]) > 1
    for one in report["kept"]:
        events, trimmed = f"Events of {one['queue']}" if names else "Events", one["trimmed"]
        older = f" {trimmed:,} older ones were trimmed." if trimmed else ""
        if one["first"] is None:
            if trimmed:
                yield f"{events} are all gone: {trimmed:,} were trimmed."
        elif since is not None and one["first"] > since and trimmed != 0:
            yield (
                f"{events} go back to {_moment(one['first'])} only; all since {_moment(since)} "
                f"were asked for.{older}"
            )
        elif since is None and trimmed:
            yield f"{events} go back to {_moment(one['first'])}.{older}"


def _losses(report: dict[str, Any]) -> Iterable[str]:
    losses = report["losses"]
    names = len({*report["queues"], *(one["queue"] for one in losses)}) > 1
    largest = sorted(losses, key=lambda one: -(one["lost"] or 0))[:_MOST_LOSSES]
    for one in losses:
        if one not in largest:
            continue
        of = f" of {one['queue']}" if names else ""
        when = f"before {_moment(one['before_ts'])}"
        if one["after_ts"]:
            when = f"between {_between(one['after_ts'], one['before_ts'], ' and ')}"
        if one["lost"] is None:
            yield f"Events{of} may be missing {when}; nobody knows how many."
        else:
            lost, were = count(one["lost"], "event"), "was" if one["lost"] == 1 else "were"
            yield (
                f"{lost}{of} {were} trimmed before they were read, {when}: counts of that time are "
                "too low."
            )
    if len(losses) > _MOST_LOSSES:
        total = sum(one["lost"] or 0 for one in losses)
        yield f"In all, {total:,} events were lost, at {len(losses):,} times. The plots show where."


# ── Numbers and plots ───────────────────────────────────────────────────────────────────────────


def _tiles(report: dict[str, Any]) -> str:
    totals = report["totals"]
    span_s = (
        datetime.fromisoformat(report["last"]) - datetime.fromisoformat(report["first"])
    ).total_seconds()
    runs, failed = totals["completed"] + totals["failed"], totals["failed"]
    rate = totals["completed"] / span_s if span_s >= 1 else None
    share = 100 * failed / runs if runs else 0
    tiles = [
        ("completed", _tall(totals["completed"]), "" if rate is None else _rate(rate)),
        ("failed", _tall(failed), f"{_share(share)} of runs"),
        ("retried", _tall(totals["retried"]), ""),
        (_DEAD_NAME, _tall(totals["dead_lettered"]), ""),
    ]
    for label, name, scale in (
        ("run time, median", "run_us", 1),
        ("wait, median", "wait_ms", 1000),
    ):
        p50, p95, p99 = (_time(totals.get(f"{name}_{one}"), scale) for one in ("p50", "p95", "p99"))
        tiles.append((label, p50, f"<i>p95 {p95}</i> <i>p99 {p99}</i>"))
    return "<div class=tiles>" + "".join(
        f"<div class=tile><small>{label}</small><b>{value}</b><small>{more}</small></div>"
        for label, value, more in tiles
    ) + "</div>"  # fmt: skip


def _plots(report: dict[str, Any]) -> Iterable[str]:
    line = Timeline(report)
    window = _window(line.window_s)
    done = Series("completed", "done", line.values("completed"))
    yield _section("Completed", f"jobs in each {window}", plots.bars(line, [done]), _legend(report))
    ends = [
        Series("failed", "failed", line.values("failed")),
        Series("retried", "retried", line.values("retried")),
        Series(_DEAD_NAME, "dead", line.values("dead_lettered")),
    ]
    text = f"runs that failed and what became of their jobs, in each {window}"
    yield _section("Failed", text, plots.bars(line, ends), _legend(report, ends, "bar"))
    for title, what, kind, scale in (
        ("Wait", "from when a run was due until it began", "wait_ms", 1000),
        ("Run time", "from a run's begin to its end", "run_us", 1),
    ):
        ranks = [
            Series(one, one, line.values(f"{kind}_{one}", scale)) for one in ("p50", "p95", "p99")
        ]
        is_known = any(value is not None for one in ranks for value in one.values)
        drawn = plots.durations(line, ranks) if is_known else ""
        yield _section(title, what, drawn, _legend(report, ranks) if is_known else "")
    if report["heat"]:
        most = max(cell["runs"] for cell in report["heat"])
        text = f"runs by time and length; the strongest colour is {count(most, 'run')}"
        yield _section("Durations", text, plots.heat(line, report["heat"]), _legend(report))


def _legend(report: dict[str, Any], series: Iterable[Series] = (), mark: str = "line") -> str:
    shape = {"line": "M0 5H20", "bar": "M4 0H16V10H4z"}[mark]
    items = [
        f'<span><svg viewBox="0 0 20 10" aria-hidden="true"><path class="{mark} {one.style}" '
        f'd="{shape}"/></svg>{one.name}</span>'
        for one in series
    ]
    if report["losses"]:
        items.append("<span><i class=band></i>events lost</span>")
    return f"<p class=legend>{''.join(items)}</p>" if items else ""


def _section(title: str, what: str, content: str, legend: str = "") -> str:
    what = f"<p class=soft>{what}</p>" if what else ""
    return f"<section><h2>{title}</h2>{what}{legend}{content or '<p>None.</p>'}</section>"


# ── Tables ──────────────────────────────────────────────────────────────────────────────────────

#: A column: its name, and a class of the style sheet (`n` for numbers).
_Column = tuple[str, str]


def _table(columns: Sequence[_Column], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    kinds = [f' class="{kind}"' if kind else "" for _, kind in columns]
    head = "".join(
        f'<th scope="col"{kind}>{name}</th>' for (name, _), kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-label="{name}"{kind}>{cell}</td>'
            for cell, (name, _), kind in zip(row, columns, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""


def _tables(report: dict[str, Any]) -> Iterable[str]:
    if len(report["queues"]) > 1:
        yield _section("Queues", "what happened in each", _work(report["by_queue"], ("queue",)))
    yield _section("Retries", "jobs by attempts so far and outcome", _funnel(report["funnel"]))
    rows = report["signatures"]
    left = report["totals"]["failed"] - sum(row["failures"] for row in rows)
    more = f"; {left:,} failures with rarer ones are left off" if left > 0 else ""
    dead = report["dlq"] and {
        row["signature"]: row["failures"] for row in report["dlq"]["signatures"]
    }
    text = f"failed runs by what their errors have in common{more}"
    yield _section("Failures", text, _signatures(rows, "failures", report, dead))
    names = report["names"]
    text = "by 95th percentile of run time"
    if report["names_in_all"] > len(names):
        text += f", the first {len(names)} of {report['names_in_all']:,}"
    yield _section("Slowest names", text, _work(names, ("name", "queue")))


def _funnel(rows: list[dict[str, Any]]) -> str:
    most = max((row["jobs"] for row in rows), default=1)
    columns = (("attempts", ""), ("outcome", ""), ("jobs", "n"), ("", "wide"))
    return _table(
        columns,
        (
            (
                str(row["attempts"]),
                escape(row["outcome"]),
                f"{row['jobs']:,}",
                f'<i class=share style="width:{100 * row["jobs"] / most:.1f}%"></i>',
            )
            for row in rows
        ),
    )


def _signatures(
    rows: list[dict[str, Any]],
    counted: str,
    report: dict[str, Any],
    dead: dict[str, int] | None = None,
) -> str:
    has_queues = len(report["queues"]) > 1
    columns = [(counted, "n"), *([("dead now", "n")] if dead is not None else [])]
    columns += [("reason", "what"), ("signature", "one"), ("seen", "seen")]
    columns += [("some jobs", "ids")]

    def cells(row: dict[str, Any]) -> Iterable[str]:
        yield f"{row['failures']:,}"
        if dead is not None:
            yield f"{dead.get(row['signature'], 0):,}"
        names = ", ".join(name or "(unnamed)" for name in row["names"])
        where = f" in {', '.join(row['queues'])}" if has_queues else ""
        yield (
            f"<code>{escape(row['masked_reason']) or '(no text)'}</code>"
            f"<small>{escape(names + where)}</small>"
        )
        yield f"<code>{escape(row['signature'])}</code>"
        first, _, last = _between(row["first_seen"], row["last_seen"], "|").partition("|")
        yield f"<span>{first}</span> <span>to {last}</span>"
        yield "".join(_sample(one) for one in row["sample_ids"][:_SAMPLES])

    return _table(columns, (tuple(cells(row)) for row in rows))


def _sample(job_id: str) -> str:
    """An id, which may be any text; a long one is cut."""
    if len(job_id) <= _ID_CHARS:
        return f"<code>{escape(job_id)}</code>"
    return f'<code title="{escape(job_id)}">{escape(job_id[:_ID_CHARS])}…</code>'


def _work(rows: list[dict[str, Any]], by: Sequence[str]) -> str:
    columns = [*((name, "") for name in by), ("completed", "n"), ("failed", "n"), ("retried", "n")]
    columns += [("dead", "n"), ("p50", "n"), ("p95", "n"), ("p99", "n")]
    return _table(
        columns,
        (
            (
                *(escape(row[name] or "(unnamed)") for name in by),
                *(f"{row[name]:,}" for name in ("completed", "failed", "retried", "dead_lettered")),
                *(_time(row[f"run_us_{one}"]) for one in ("p50", "p95", "p99")),
            )
            for row in rows
        ),
    )


def _dead(report: dict[str, Any]) -> str:
    title, found = "Dead-letter queue", report["dlq"]
    if found is None:
        why = report.get("dlq_unknown")
        text = f"Not known: {why}." if why else "Not known: no server was asked."
        return _section(title, "", f"<p>{escape(text)}</p>")
    if not found["jobs"]:
        return _section(title, "", "<p>Empty.</p>")
    kinds = ", ".join(f"{row['jobs']:,} {row['reason'] or 'unknown'}" for row in found["reasons"])
    signatures = found["signatures"]
    left = found["jobs"] - sum(row["failures"] for row in signatures)
    more = f" {left:,} with rarer signatures are left off." if left > 0 else ""
    text = f"{count(found['jobs'], 'job')} when the report was made: {kinds}.{more}"
    first = signatures[0]
    command = (
        f"chasqui spark replay --queue {','.join(first['queues'])} --signature {first['signature']}"
    )
    hint = f"<p class=soft>To run those of one signature again: <code>{escape(command)}</code></p>"
    return _section(title, escape(text), _signatures(signatures, "jobs", report) + hint)


def _numbers(report: dict[str, Any]) -> str:
    """The numbers of the plots, for readers who cannot see them."""
    columns = [("window", ""), ("completed", "n"), ("failed", "n"), ("retried", "n"), ("dead", "n")]
    columns += [("wait p95", "n"), ("run p95", "n")]
    rows = (
        (
            _moment(row["start"]),
            *(f"{row[name]:,}" for name in ("completed", "failed", "retried", "dead_lettered")),
            _time(row.get("wait_ms_p95"), 1000),
            _time(row["run_us_p95"]),
        )
        for row in report["timeline"]
    )
    return f"<details><summary>The plots in numbers</summary>{_table(columns, rows)}</details>"


# ── Words ───────────────────────────────────────────────────────────────────────────────────────


def _tall(number: int) -> str:
    """A number that fits its tile."""
    if number < 10**9:
        return f"{number:,}"
    return f'<span title="{number:,}">{number / 10**9:,.2f} billion</span>'


def _rate(per_s: float) -> str:
    return f"{per_s:,.{int(per_s < 100)}f} a second"


def _share(percent: float) -> str:
    return "less than 0.01 %" if 0 < percent < 0.01 else f"{percent:.2g} %"


def _time(value: float | None, scale: int = 1) -> str:
    return "-" if value is None else duration(value * scale)


def _window(window_s: int) -> str:
    names = {1: "second", 60: "minute", 3600: "hour", 86_400: "day"}
    return names.get(window_s, duration(window_s * 1e6))


def _moment(text: str) -> str:
    moment = datetime.fromisoformat(text)
    return f"{moment.day} {moment:%b %Y, %H:%M:%S}"


def _between(first: str, last: str, word: str = " to ") -> str:
    """Two times; the second with its day if that is another."""
    same_day = first[:10] == last[:10]
    return f"{_moment(first)}{word}{last[11:19] if same_day else _moment(last)}"
