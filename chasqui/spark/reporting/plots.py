"""Plots of a report: SVG that stretches with the page, and HTML around it that does not.

A plot has one column per window, also for windows without events. Text, bands and tips are HTML, so
they keep their size on a narrow screen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any, Final, TypeAlias

from chasqui.model.words import duration

#: A value in words.
Say: TypeAlias = Callable[[float], str]

_HEIGHT: Final = 100.0
_TIME_TICKS: Final = 8
_VALUE_TICKS: Final = 5
#: Beyond this share of the width, the text of a tick would stick out.
_LAST_TICK: Final = 0.94
_DAY_S: Final = 86_400
_YEAR_S: Final = 365 * _DAY_S
_STEPS_S: Final = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200,
    _DAY_S, 2 * _DAY_S, 7 * _DAY_S, 14 * _DAY_S, 28 * _DAY_S, 91 * _DAY_S, 364 * _DAY_S,
    3640 * _DAY_S, 18_200 * _DAY_S,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Series:
    """Values per window, or None; `style` is a class of the style sheet."""

    name: str
    style: str
    values: Sequence[float | None]


class Timeline:
    """The windows of a report, which all its plots share."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.window_s: int = report["window_s"]
        rows = report["timeline"]
        self._first_s = _unix_s(rows[0]["start"])
        self.count = self.column(rows[-1]["start"]) + 1
        self.rows: list[dict[str, Any] | None] = [None] * self.count
        for row in rows:
            self.rows[self.column(row["start"])] = row
        self._bands = [self._band(loss) for loss in report["losses"]]
        self.titles = [self._title(i) for i in range(self.count)]

    def column(self, start: str) -> int:
        return round((_unix_s(start) - self._first_s) / self.window_s)

    def values(self, name: str, scale: int = 1) -> list[float | None]:
        """A number of each window; None if the window has no events that it is made of."""
        return [
            None if row is None or row.get(name) is None else row[name] * scale for row in self.rows
        ]

    def _title(self, column: int) -> str:
        start_s = self._first_s + column * self.window_s
        text = f"{clock(start_s, self._span_s)} to {clock(start_s + self.window_s, self._span_s)}"
        place, width = column / self.count, 1 / self.count
        is_lost = any(left < place + width and left + size > place for left, size in self._bands)
        return text + (", events lost" if is_lost else "")

    @property
    def _span_s(self) -> float:
        return self.count * self.window_s

    def _band(self, loss: dict[str, Any]) -> tuple[float, float]:
        """Where events were lost, as a share of the width: left and size."""
        ends = (loss["after_ts"], loss["before_ts"])
        start, end = (
            min(1.0, max(0.0, (_unix_s(one) - self._first_s) / self._span_s)) if one else 0.0
            for one in ends
        )
        return start, end - start

    def bands(self) -> str:
        return "".join(
            f'<i class=band style="left:min({100 * left:.2f}%,100% - 3px);width:{100 * size:.2f}%">'
            "</i>"
            for left, size in self._bands
        )

    def ticks(self) -> str:
        """Round moments below the plot."""
        step = next((s for s in _STEPS_S if self._span_s / s <= _TIME_TICKS), _STEPS_S[-1])
        texts = list[str]()
        at_s = -(-self._first_s // step) * step
        while (place := (at_s - self._first_s) / self._span_s) <= _LAST_TICK:
            odd = " class=odd" if len(texts) % 2 else ""
            text = clock(at_s, self._span_s, step)
            texts.append(f'<span{odd} style="left:{100 * place:.2f}%">{text}</span>')
            at_s += step
        return f"<div class=x aria-hidden=true>{''.join(texts)}</div>"


def clock(unix_s: float, span_s: float, step_s: float = 1) -> str:
    """A time on an axis of this length: the time of day, and the day if it is needed."""
    moment = datetime.fromtimestamp(unix_s, UTC)
    day = f"{moment:%b %Y}" if span_s > _YEAR_S else f"{moment.day} {moment:%b}"
    if step_s >= _DAY_S:
        return day
    time = f"{moment:%H:%M:%S}" if step_s % 60 else f"{moment:%H:%M}"
    if step_s > 1:
        return day if unix_s % _DAY_S == 0 and span_s > _DAY_S / 2 else time
    time = time.removesuffix(":00") if time.count(":") == 2 else time
    return f"{day} {time}" if span_s > _DAY_S / 2 else time


# ── Kinds of plots ──────────────────────────────────────────────────────────────────────────────


def bars(line: Timeline, series: list[Series]) -> str:
    """Counts per window. The other series are parts of the first, side by side inside its bar.

    A base line marks the windows that have events.
    """
    step, top = _whole_steps(_most(series))
    drawn = _bars(series[0], 0.06, 0.88, top)
    for i, one in enumerate(series[1:]):
        width = 0.88 / (len(series) - 1)
        drawn += _bars(one, 0.06 + i * width + 0.08, width - 0.16, top)
    seen = "".join(f"M{i} 100h1" for i, row in enumerate(line.rows) if row is not None)
    drawn += f'<path class=base d="{seen}"/>'
    return _plot(line, series, drawn, (step, top, _short), _exact)


def _bars(series: Series, left: float, width: float, top: float) -> str:
    path = "".join(
        f"M{i + left:.2f} 100V{_y(value, top)}h{width:.2f}V100z"
        for i, value in enumerate(series.values)
        if value
    )
    return f'<path class="bar {series.style}" d="{path}"/>'


def durations(line: Timeline, series: list[Series]) -> str:
    """Microseconds per window, as lines with gaps where there were no events."""
    step, top = _time_steps(_most(series))
    return _plot(line, series, _paths(series, top), (step, top, _time), duration)


def heat(line: Timeline, cells: list[dict[str, Any]]) -> str:
    """Runs by window and duration: rows begin at 1, 2, 5, 10, … microseconds."""
    low, high = (pick(cell["from_us"] for cell in cells) for pick in (min, max))
    edges = _edges(low, high)
    most = max(cell["runs"] for cell in cells)
    height = _HEIGHT / (len(edges) - 1)
    parts = []
    for cell in cells:
        row, column = edges.index(cell["from_us"]), line.column(cell["start"])
        strength = 0.15 + 0.85 * (cell["runs"] / most) ** 0.5
        band = f"{duration(edges[row])} to {duration(edges[row + 1])}"
        parts.append(
            f'<rect x="{column + 0.03:.2f}" y="{_HEIGHT - (row + 1) * height + 0.3:.2f}" '
            f'width=".94" height="{height - 0.6:.2f}" fill-opacity="{strength:.2f}">'
            f"<title>{line.titles[column]}: {cell['runs']:,} runs of {band}</title></rect>"
        )
    is_short = len(edges) <= _VALUE_TICKS + 2
    labels = "".join(
        f'<span style="bottom:{i * height:.2f}%">{duration(edge)}</span>'
        for i, edge in enumerate(edges)
        if is_short or str(edge)[0] == "1"
    )
    size = f'style="height:{max(8, 1.15 * (len(edges) - 1)):.1f}rem"'
    label = f"Runs by time and length, from {duration(low)} to {duration(edges[-1])}"
    return (
        f"<div class=plot><div class=y aria-hidden=true>{labels}</div><div class=area {size}>"
        f"{_svg(line, label, ''.join(parts), 'heat')}{line.bands()}</div>{line.ticks()}</div>"
    )


# ── Parts of a plot ─────────────────────────────────────────────────────────────────────────────


def _plot(
    line: Timeline,
    series: list[Series],
    drawn: str,
    axis: tuple[float, float, Say],
    say: Say,
) -> str:
    step, top, tick_text = axis
    ticks = [i * step for i in range(round(top / step) + 1)]
    labels = "".join(
        f'<span style="bottom:{100 * tick / top:.2f}%">{tick_text(tick)}</span>' for tick in ticks
    )
    grid = "".join(f"M0 {_y(tick, top)}H{line.count}" for tick in ticks)
    svg = f'<path class=grid d="{grid}"/>{drawn}'
    label = "; ".join(_summary(one, line, say) for one in series)
    tips = "".join(
        f"<div><span>{title}: {_tip(series, line, i, say)}</span></div>"
        for i, title in enumerate(line.titles)
    )
    return (
        f"<div class=plot><div class=y aria-hidden=true>{labels}</div><div class=area>"
        f"{_svg(line, label, svg)}{line.bands()}"
        f"<div class=tips aria-hidden=true>{tips}</div></div>{line.ticks()}</div>"
    )


def _svg(line: Timeline, label: str, content: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return (
        f'<svg{named} viewBox="0 0 {line.count} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{content}</svg>'
    )


def _summary(series: Series, line: Timeline, say: Say) -> str:
    known = [(value, i) for i, value in enumerate(series.values) if value is not None]
    if not known:
        return f"{series.name}: nothing known"
    most, where = max(known)
    least, _ = min(known)
    return f"{series.name}: {say(least)} to {say(most)}, most at {line.titles[where]}"


def _tip(series: list[Series], line: Timeline, column: int, say: Say) -> str:
    if line.rows[column] is None:
        return "no events"
    texts = [
        f"{escape(one.name)} <b>{say(value)}</b>"
        for one in series
        if (value := one.values[column]) is not None
    ]
    return ", ".join(texts) or "not known"


def _paths(series: list[Series], top: float) -> str:
    """A line per series, with gaps; a dot for a value without neighbours."""
    parts = []
    for one in series:
        line, dots = "", ""
        values = [None, *one.values, None]
        for i, (before, value, after) in enumerate(
            zip(values, values[1:], values[2:], strict=False)
        ):
            if value is None:
                continue
            place = f"{i + 0.5} {_y(value, top)}"
            line += ("M" if before is None else "L") + place
            if before is None and after is None:
                dots += f"M{place}h0"
        parts.append(f'<path class="line {one.style}" d="{line}"/>')
        if dots:
            parts.append(f'<path class="dot {one.style}" d="{dots}"/>')
    return "".join(parts)


# ── Scales ──────────────────────────────────────────────────────────────────────────────────────


def _y(value: float, top: float) -> str:
    return f"{_HEIGHT - value / top * _HEIGHT:.2f}"


def _most(series: list[Series]) -> float:
    return max((value for one in series for value in one.values if value is not None), default=0)


def _whole_steps(most: float) -> tuple[float, float]:
    """A round step for an axis of counts, and the axis's end."""
    step = next(step for step in _edges(1, 10**18) if most / step <= _VALUE_TICKS)
    return step, max(step, -(-most // step) * step)


def _time_steps(most_us: float) -> tuple[float, float]:
    """A round step for an axis of durations, in the units of time, and the axis's end."""
    steps = (*_edges(1, 500_000), *(1_000_000 * step for step in _STEPS_S))
    step = next((step for step in steps if most_us / step <= _VALUE_TICKS), steps[-1])
    return step, max(step, -(-most_us // step) * step)


def _edges(low: int, high: int) -> list[int]:
    """1, 2, 5, 10, …: from `low` up to the first that is above `high`."""
    edges = [low]
    while edges[-1] <= high:
        edges.append(edges[-1] * 5 // 2 if str(edges[-1])[0] == "2" else edges[-1] * 2)
    return edges


def _short(value: float) -> str:
    """A round number in short form, for an axis."""
    for least, size, unit in ((10**9, 10**9, "bn"), (10**6, 10**6, "M"), (10**4, 1000, "k")):
        if value >= least:
            return f"{value / size:g} {unit}"
    return _exact(value)


def _time(value: float) -> str:
    return duration(value) if value else "0"


def _exact(value: float) -> str:
    return f"{value:,.0f}"


def _unix_s(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
