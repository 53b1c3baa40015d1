"""The page of a report: what it says and how it is laid out. No JVM is needed."""

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from chasqui.model.words import duration
from chasqui.spark.reporting.html import page
from chasqui.spark.reporting.plots import Timeline
from chasqui.spark.reporting.report import WINDOWS, _window_s
from tests.spark import browser
from tests.spark.pages import EVIL, GAPS, at, make_report

EMPTY: dict[str, Any] = {
    "made": at(0), "events": 0, "since": at(-60), "queues": ["orders"], "window_s": None,
    "timeline": [], "losses": [], "dlq": None,
    "kept": [{"queue": "orders", "first": None, "trimmed": 7}],
}  # fmt: skip


class Strict(HTMLParser):
    """Notes what a page asks for and whether its tags match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []
        self.seen: Counter[str] = Counter()
        self.unnamed = 0
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, dict(attrs))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, dict(attrs))

    def _note(self, tag: str, attrs: dict[str, str | None]) -> None:
        self.seen[tag] += 1
        self.asked += [attrs[name] or "" for name in ("src", "href", "data") if name in attrs]
        if tag == "svg":
            self.unnamed += not (attrs.get("aria-label") or attrs.get("aria-hidden"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(make_report(), id="all"),
        pytest.param(make_report(scale=10**7, losses=[], kept=[]), id="large"),
        pytest.param(make_report(heat=[], signatures=[], names=[], dlq=None), id="little"),
        pytest.param(EMPTY, id="empty"),
    ],
)
def test_the_page_needs_nothing_else(report: dict[str, Any]):
    text = page(report)
    found = Strict(text)
    assert not found.asked
    assert found.unnamed == found.seen["script"] == 0
    assert not re.search(r"https?:|url\(|@import", text)
    if report["events"]:
        assert text.count('role="img"') == 4 + bool(report["heat"])
        assert text.count("&lt;script&gt;") >= bool(report["names"])
    assert EVIL not in text


def test_windows_without_events_are_gaps():
    line = Timeline(make_report())
    assert [i for i, row in enumerate(line.rows) if row is None] == list(GAPS)
    text = page(make_report())
    (p50,) = re.findall(r'class="line p50" d="([^"]{40,})"', section(text, "Run time"))
    runs = [len(re.findall("[ML]", one)) for one in re.findall("M[^M]*", p50)]
    assert runs == [20, 24, 1, 63], "a line is interrupted, not drawn across"
    assert len(re.findall(r"M[\d.]+ 100h1", section(text, "Completed"))) == 118 - len(GAPS)
    assert text.count(">22:30 to 22:31: no events<") == 4
    assert section(text, "Wait").count(": no events<") == len(GAPS)
    assert section(text, "Wait").count(": not known<") == 2


def test_losses_are_told_and_drawn():
    text = page(make_report())
    assert (
        "12,345 events of orders were trimmed before they were read, between 31 Jan 2026, 22:59:30 "
        "and 23:03:00: counts of that time are too low." in text
    )
    assert "<p>Events of orders may be missing between 31 Jan 2026, 23:30:00 and " in text
    for title in ("Completed", "Failed", "Wait", "Run time", "Durations"):
        drawn = section(text, title)
        assert drawn.count("class=band") == 3, "two, and one in the legend"
        left, width = re.findall(r"left:min\(([\d.]+)%,100% - 3px\);width:([\d.]+)%", drawn)[0]
        assert float(left) == pytest.approx(100 * 49.5 / 118, abs=0.01)
        assert float(width) == pytest.approx(100 * 3.5 / 118, abs=0.01)
    assert "23:00 to 23:01, events lost: no events" in text
    assert "class=band" not in page(make_report(losses=[]))
    many = [
        {"queue": "orders", "after_ts": at(i), "before_ts": at(i + 1), "lost": i} for i in range(9)
    ]
    text = page(make_report(losses=many))
    assert text.count("before they were read") == 5
    assert "In all, 36 events were lost, at 9 times." in text


def test_the_page_says_how_far_events_go_back():
    text = page(make_report())
    assert (
        "Events of orders go back to 31 Jan 2026, 22:10:00 only; all since 31 Jan 2026, 00:10:00 "
        "were asked for. 1,234,567 older ones were trimmed." in text
    )
    assert "Events of refunds" not in text, "its events go back far enough"
    kept = [{"queue": "orders", "first": at(0), "trimmed": 0}]
    assert "go back to" not in page(make_report(kept=kept)), "there were none before"
    kept = [{"queue": "orders", "first": at(0), "trimmed": 12}]
    text = page(make_report(kept=kept, since=None))
    assert "Events go back to 31 Jan 2026, 22:10:00. 12 older ones were trimmed." in text
    text = page(EMPTY)
    assert "No events since 31 Jan 2026, 21:10:00 UTC." in text
    assert "Events are all gone: 7 were trimmed." in text


def test_what_is_not_known_of_the_dead_letter_queue_is_not_none():
    told = section(page(make_report(dlq=None, dlq_unknown="nobody answers")), "Dead-letter queue")
    assert "Not known: nobody answers." in told
    none = {"jobs": 0, "reasons": [], "signatures": []}
    assert "Empty." in section(page(make_report(dlq=none)), "Dead-letter queue")
    told = section(page(make_report()), "Dead-letter queue")
    assert "7 jobs when the report was made: 5 unrecoverable, 2 unknown." in told
    assert "2 with rarer signatures are left off" in told
    assert "replay --queue orders,refunds-of-the-northern-hemisphere --signature 800af" in told


def test_scales_are_round():
    text = page(make_report())
    labels = {
        title: re.findall(r'bottom:[\d.]+%">([^<]+)<', section(text, title))
        for title in ("Completed", "Failed", "Wait", "Run time", "Durations")
    }
    assert labels["Completed"] == ["0", "2,000", "4,000", "6,000", "8,000"]
    assert labels["Failed"] == ["0", "2", "4", "6", "8", "10"], "on a scale of its own"
    assert labels["Wait"] == ["0", "30 s", "1m", "1m 30s", "2m"]
    assert labels["Run time"] == ["0", "100 ms", "200 ms", "300 ms", "400 ms"]
    assert labels["Durations"][:5] == ["1 µs", "10 µs", "100 µs", "1 ms", "10 ms"]
    times = re.findall(r'style="left:[\d.]+%">([^<]+)<', section(text, "Completed"))
    assert times[:2] == ["22:15", "22:30"]


@pytest.mark.parametrize(
    ("us", "words"),
    [
        (0, "0 µs"), (850, "850 µs"), (999.6, "1 ms"), (7_900, "7.9 ms"), (46_000, "46 ms"),
        (999_700, "1 s"), (2_450_000, "2.5 s"), (27_000_000, "27 s"), (59_700_000, "1m"),
        (104_000_000, "1m 44s"), (3_599_700_000, "1h"), (12_000_000_000, "3h 20m"),
        (86_399_000_000, "1d"), (190_800_000_000, "2d 5h"),
    ],
)  # fmt: skip
def test_durations_are_as_people_say_them(us: float, words: str):
    assert duration(us) == words


@pytest.mark.parametrize("span_s", [0, 1, 3600, 86_400, 10**7, 1_800_000_000])
def test_no_span_has_too_many_windows(span_s: int):
    """One worker whose clock says 1970 makes a span of decades."""
    window_s = _window_s(span_s)
    assert span_s / window_s <= WINDOWS
    last = at((span_s // window_s) * window_s / 60)
    rows = [{**row, "start": start} for row, start in zip(
        make_report()["timeline"][:2], (at(0), last), strict=True)]  # fmt: skip
    text = page(make_report(timeline=rows, window_s=window_s, heat=[], losses=[]))
    labels = re.findall(r'style="left:[\d.]+%">([^<]+)<', section(text, "Completed"))
    assert 1 <= len(labels) <= 8
    assert len(set(labels)) == len(labels)


def section(text: str, title: str) -> str:
    return text.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]


# ── In a browser ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def chromium() -> str:
    """No Python package brings a browser, so it is used where there is one, in CI too."""
    found = browser.find()
    if found is None:
        pytest.skip("no Chromium is on PATH (Debian: apt-get install chromium)")
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_readable(chromium: str, dark: bool, tmp_path: Path):
    text = page(make_report(scale=100_000 if dark else 1))
    widths = (400, 1280)
    facts = browser.look(chromium, text, tmp_path, dark=dark, widths=widths)
    assert facts.pop("console") == []
    for width in widths:
        seen = facts[width]
        assert seen["width"] == width
        assert seen["scroll"] == width, "no scrolling sideways"
        assert seen["texts"] > 100
        assert (seen["axes"], seen["bare_axes"]) == (10, 0)
        for fault in ("cut", "meeting", "small", "faint"):
            assert seen[fault] == [], (width, fault)
        assert seen["dark"] is dark
        assert seen["hovered"] == [True] * 4
