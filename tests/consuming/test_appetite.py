"""Appetite: how much is read at which pace, and what goes back."""

from collections.abc import Callable
from typing import Any

import pytest

from chasqui.consuming import appetite
from chasqui.consuming.appetite import AHEAD_S, HOLD_S, Appetite
from chasqui.consuming.config import ConsumerConfig
from chasqui.consuming.held import Held


class Stage:
    """A worker's slots, at times of the test's choice."""

    def __init__(self, patch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now_s = 1000.0
        patch.setattr(appetite.time, "monotonic", lambda: self.now_s)
        self.held = Held("q", 15.0)
        self.appetite = Appetite(ConsumerConfig(**options), self.held)
        self.appetite._entry_bytes = 100.0

    def come(self, count: int) -> None:
        self.appetite.came(36 if self.appetite._entry_bytes < 1000 else 1 << 20)
        self.held.waiting.extend(object() for _ in range(count))  # type: ignore[misc]

    def work(self, seconds: float, pace: float) -> None:
        """Finish runs at a pace, looking around as often as a reader does."""
        for _ in range(round(seconds / 0.1)):
            self.now_s += 0.1
            self.held.finished += round(pace / 10)
            self.appetite.wanted()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stage]:
    return lambda **options: Stage(monkeypatch, **options)


def test_at_first_only_idle_slots_count(stage: Callable[..., Stage]) -> None:
    at = stage()
    at.held.open_places = 7
    assert at.appetite.wanted() == 7


def test_a_quick_pace_is_read_ahead_of(stage: Callable[..., Stage]) -> None:
    at = stage()
    at.work(3, pace=10_000)
    assert at.appetite.wanted() == pytest.approx(10_000 * AHEAD_S, abs=5)


@pytest.mark.parametrize(("prefetch", "most"), [(0, 0), (3, 3)])
def test_prefetch_is_the_most(stage: Callable[..., Stage], prefetch: int, most: int) -> None:
    at = stage(prefetch=prefetch)
    at.work(3, pace=10_000)
    assert at.appetite.wanted() == most


@pytest.mark.parametrize(
    ("run_s", "options", "ahead"),
    [
        (0.1, {"concurrency": 1}, 1),
        (0.1, {"concurrency": 4}, 1),
        (0.1, {"concurrency": 1, "prefetch": 0}, 0),
        (0.1, {"concurrency": 1, "batch": 4}, 1),
        (1.0, {"concurrency": 1}, 0),
        (1.0, {"concurrency": 10}, 0),
        (1.0, {"concurrency": 1, "batch": 10}, 0),
    ],
)
def test_one_entry_waits_behind_runs_that_are_short(
    stage: Callable[..., Stage], run_s: float, options: dict[str, Any], ahead: int
) -> None:
    """All slots begin and end together, a round trip apart: the worst that an entry can meet."""
    at = stage(**options)
    places = options["concurrency"] * options.get("batch", 1)
    for _ in range(20):
        at.held.open_places = places
        at.now_s += 0.02
        asked = at.appetite.wanted()
        at.held.open_places = 0
        at.come(asked - places)  # the others begin at once
        at.now_s += run_s
        at.held.finished += places
        assert at.appetite.excess() == 0, "nothing is read that goes back"
        at.held.waiting.clear()
    assert asked == places + ahead


def test_runs_that_end_at_once_are_no_quick_pace(stage: Callable[..., Stage]) -> None:
    at = stage()
    for _ in range(5):
        at.now_s += 1.0
        at.held.finished += 100
        at.appetite.wanted()
        at.now_s += 0.06
        at.held.finished += 10
        assert at.appetite.wanted() <= 4


def test_large_entries_bound_what_is_held(stage: Callable[..., Stage]) -> None:
    at = stage()
    at.work(3, pace=100_000)
    at.appetite._entry_bytes = float(1 << 20)
    assert at.appetite.wanted() == 32
    at.come(17)
    assert at.appetite.wanted() == 0


def test_what_is_begun_soon_is_kept(stage: Callable[..., Stage]) -> None:
    at = stage()
    at.come(100)
    at.now_s += HOLD_S
    at.held.finished += 100
    assert at.appetite.excess() == 0
    assert at.appetite.excess() == 0, "it is not yet time to judge again"


def test_what_is_not_begun_soon_goes_back_within_two_judgments(
    stage: Callable[..., Stage],
) -> None:
    at = stage()
    at.work(3, pace=10_000)
    at.come(100)
    at.held.finished += 100  # then all stands still
    at.now_s += HOLD_S
    assert at.appetite.excess() == 0
    at.now_s += at.appetite.judged_in_s()
    assert at.appetite.excess() == 100
    at.held.waiting.clear()
    assert at.appetite.wanted() == 0, "nothing is read until a slot is idle"
    at.held.open_places = 1
    assert at.appetite.wanted() == 1


def test_a_slow_pace_keeps_what_it_will_begin(stage: Callable[..., Stage]) -> None:
    at = stage()
    at.come(1000)
    at.now_s += HOLD_S
    at.held.finished += 4
    assert at.appetite.excess() == 996


def test_time_without_anything_waiting_is_not_judged(stage: Callable[..., Stage]) -> None:
    at = stage()
    at.come(1)
    at.held.waiting.clear()
    at.now_s += 60
    at.come(50)
    assert at.appetite.excess() == 0
