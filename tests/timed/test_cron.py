"""Cron expressions: what is read, what is refused, and when they fire where clocks change."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chasqui.timed.cron import Cron

HOUR = 3600
DAY = 24 * HOUR
YEARS = range(2016, 2027)


def unix_ms(text: str, tz: str = "UTC", *, fold: int = 0) -> int:
    local = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(tz), fold=fold)
    return int(local.timestamp() * 1000)


def fires(cron: Cron, after: str, count: int, tz: str = "UTC") -> list[str]:
    """The next fires as local times; ' marks one that came the second time."""
    at = unix_ms(after, tz)
    shown = []
    for _ in range(count):
        following = cron.next_after(at)
        assert following is not None
        assert following > at
        at = following
        local = datetime.fromtimestamp(at // 1000, ZoneInfo(tz))
        shown.append(local.strftime("%a %d %b %H:%M:%S") + "'" * local.fold)
    return shown


# What is read


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("*/20 * * * *", ["Thu 01 Jan 00:20:00", "Thu 01 Jan 00:40:00", "Thu 01 Jan 01:00:00"]),
        ("5-7 3 * * *", ["Thu 01 Jan 03:05:00", "Thu 01 Jan 03:06:00", "Thu 01 Jan 03:07:00"]),
        ("0 1,4 * * *", ["Thu 01 Jan 01:00:00", "Thu 01 Jan 04:00:00", "Fri 02 Jan 01:00:00"]),
        ("0 8-18/5 * * *", ["Thu 01 Jan 08:00:00", "Thu 01 Jan 13:00:00", "Thu 01 Jan 18:00:00"]),
        ("*/25 * * * * *", ["Thu 01 Jan 00:00:25", "Thu 01 Jan 00:00:50", "Thu 01 Jan 00:01:00"]),
        ("30 0 12 * * *", ["Thu 01 Jan 12:00:30", "Fri 02 Jan 12:00:30", "Sat 03 Jan 12:00:30"]),
        ("0 9 * * mon-wed", ["Mon 05 Jan 09:00:00", "Tue 06 Jan 09:00:00", "Wed 07 Jan 09:00:00"]),
        ("0 9 * * 7", ["Sun 04 Jan 09:00:00", "Sun 11 Jan 09:00:00", "Sun 18 Jan 09:00:00"]),
        ("0 0 1 FEB,nov *", ["Sun 01 Feb 00:00:00", "Sun 01 Nov 00:00:00", "Mon 01 Feb 00:00:00"]),
        ("0 0 L * *", ["Sat 31 Jan 00:00:00", "Sat 28 Feb 00:00:00", "Tue 31 Mar 00:00:00"]),
        ("0 0 LW * *", ["Fri 30 Jan 00:00:00", "Fri 27 Feb 00:00:00", "Tue 31 Mar 00:00:00"]),
        ("0 0 * * 5L", ["Fri 30 Jan 00:00:00", "Fri 27 Feb 00:00:00", "Fri 27 Mar 00:00:00"]),
        ("0 0 * * mon#2", ["Mon 12 Jan 00:00:00", "Mon 09 Feb 00:00:00", "Mon 09 Mar 00:00:00"]),
        # Two restricted day fields: either will do.
        ("0 0 13 * 5", ["Fri 02 Jan 00:00:00", "Fri 09 Jan 00:00:00", "Tue 13 Jan 00:00:00"]),
        ("0 0 29 2 *", ["Tue 29 Feb 00:00:00", "Sun 29 Feb 00:00:00", "Fri 29 Feb 00:00:00"]),
        ("@hourly", ["Thu 01 Jan 01:00:00", "Thu 01 Jan 02:00:00", "Thu 01 Jan 03:00:00"]),
        ("@daily", ["Fri 02 Jan 00:00:00", "Sat 03 Jan 00:00:00", "Sun 04 Jan 00:00:00"]),
        ("@midnight", ["Fri 02 Jan 00:00:00", "Sat 03 Jan 00:00:00", "Sun 04 Jan 00:00:00"]),
        ("@weekly", ["Sun 04 Jan 00:00:00", "Sun 11 Jan 00:00:00", "Sun 18 Jan 00:00:00"]),
        ("@monthly", ["Sun 01 Feb 00:00:00", "Sun 01 Mar 00:00:00", "Wed 01 Apr 00:00:00"]),
        ("@Yearly", ["Fri 01 Jan 00:00:00", "Sat 01 Jan 00:00:00", "Mon 01 Jan 00:00:00"]),
        ("@annually", ["Fri 01 Jan 00:00:00", "Sat 01 Jan 00:00:00", "Mon 01 Jan 00:00:00"]),
    ],
)
def test_expression_fires_when_it_says(expression: str, expected: list[str]) -> None:
    assert fires(Cron(expression), "2026-01-01", 3) == expected


def test_next_fire_is_a_whole_second_and_strictly_later() -> None:
    cron = Cron("*/10 * * * * *")
    assert [cron.next_after(ms) for ms in (0, 1, 9_999, 10_000, 10_001)] == [
        10_000,
        10_000,
        10_000,
        20_000,
        20_000,
    ]


@pytest.mark.parametrize(
    ("tz", "utc_hour"),
    [
        (None, 12),
        ("", 12),
        ("UTC", 12),
        ("utc", 12),
        ("Z", 12),
        ("+00:00", 12),
        ("+05:30", 6.5),
        ("+0530", 6.5),
        ("-08:00", 20),
        ("-0800", 20),
        ("Asia/Kolkata", 6.5),
        ("America/New_York", 17),
        ("US/Eastern", 17),
    ],
)
def test_zone_decides_what_noon_is(tz: str | None, utc_hour: float) -> None:
    following = Cron("0 12 * * *", tz).next_after(unix_ms("2026-01-01"))
    assert following == unix_ms("2026-01-01") + utc_hour * HOUR * 1000


def test_nothing_after_the_last_year() -> None:
    last = unix_ms("9999-12-31T23:59:59")
    for tz in (None, "Asia/Tokyo", "America/New_York"):
        cron = Cron("* * * * *", tz)
        assert cron.next_after(last) is None
        assert cron.next_after(2**64 - 1) is None


# What is refused


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("61 * * * *", "bad minute '61'"),
        ("* 24 * * *", "bad hour '24'"),
        ("* * 0 * *", "bad day-of-month '0'"),
        ("* * * 13 *", "bad month '13'"),
        ("* * * * FOO", "bad day-of-week 'FOO'"),
        ("0 0 15W * *", "bad day-of-month '15W'"),
        ("0 0 ? * MON", r"bad day-of-month '\?'"),
        ("* * * * 1#6", "bad day-of-week '1#6'"),
        ("60 * * * * *", "bad second '60'"),
        ("*/0 * * * *", r"bad minute '\*/0'"),
        ("30-10 * * * *", "bad minute '30-10'"),
        ("1,,2 * * * *", "bad minute '1,,2'"),
        ("-1 * * * *", "bad minute '-1'"),
        ("\u0661 * * * *", "bad minute"),
        ("", "has 0 fields, expected 5, or 6"),
        ("* * * *", "has 4 fields, expected 5, or 6"),
        ("* * * * * * 2027", "has 7 fields, .*; years are not supported"),
        ("@reboot", "unknown alias, expected one of @yearly"),
        ("0 0 30 2 *", "never fires: no day-of-month '30' in month '2'"),
        ("0 0 31 4,6,9,11 *", "never fires: no day-of-month '31' in month '4,6,9,11'"),
        ("1," * 501 + "1 * * * *", "more than 1000 characters"),
        ("9" * 900 + " * * * *", "bad minute"),
    ],
)
def test_bad_expression_is_refused_with_the_offending_part(expression: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"^cron expression .*{told}"):
        Cron(expression)


@pytest.mark.parametrize(
    "tz",
    [
        "Mars/Olympus_Mons",
        "America",
        "../UTC",
        "/etc/localtime",
        "localtime",
        "posix/Europe/Berlin",
        "right/Europe/Berlin",
        "+24:00",
        "+5",
        "+05:60",
        "5:30",
        "a\0b",
        "x" * 5000,
    ],
)
def test_unknown_zone_is_refused(tz: str) -> None:
    with pytest.raises(ValueError, match=r"^unknown tz .*expected UTC, an offset such as"):
        Cron("* * * * *", tz)


@given(st.text("0123456789*/-,LW#@? JANMOxé\t", max_size=40), st.text(max_size=8))
def test_any_text_is_read_or_refused_with_a_value_error(expression: str, tz: str) -> None:
    for zone in (None, tz):
        try:
            cron = Cron(expression, zone)
        except ValueError:
            continue
        assert cron.next_after(0) is not None


# Where a clock is put forward or back


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        # In the gap: once, when it ends.
        ("30 2 * * *", ["Sun 08 Mar 03:00:00", "Mon 09 Mar 02:30:00", "Tue 10 Mar 02:30:00"]),
        ("0,10 0 2 * * *", ["Sun 08 Mar 03:00:00", "Mon 09 Mar 02:00:00", "Mon 09 Mar 02:00:10"]),
        ("15,45 2,3 * * *", ["Sun 08 Mar 03:00:00", "Sun 08 Mar 03:15:00", "Sun 08 Mar 03:45:00"]),
        ("0 2,3 * * *", ["Sun 08 Mar 03:00:00", "Mon 09 Mar 02:00:00", "Mon 09 Mar 03:00:00"]),
        # At its edges: nothing special.
        ("0 3 * * *", ["Sun 08 Mar 03:00:00", "Mon 09 Mar 03:00:00", "Tue 10 Mar 03:00:00"]),
        ("59 1 * * *", ["Sun 08 Mar 01:59:00", "Mon 09 Mar 01:59:00", "Tue 10 Mar 01:59:00"]),
        # An interval goes on with its next time.
        ("*/30 2 * * *", ["Mon 09 Mar 02:00:00", "Mon 09 Mar 02:30:00", "Tue 10 Mar 02:00:00"]),
    ],
)
def test_skipped_local_time(expression: str, expected: list[str]) -> None:
    tz = "America/New_York"
    assert fires(Cron(expression, tz), "2026-03-07T04:00:00", 3, tz) == expected


def test_interval_has_no_extra_fire_behind_the_gap() -> None:
    tz = "America/New_York"
    assert fires(Cron("30 * * * *", tz), "2026-03-08T01:00:00", 3, tz) == [
        "Sun 08 Mar 01:30:00",
        "Sun 08 Mar 03:30:00",
        "Sun 08 Mar 04:30:00",
    ]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("30 1 * * *", ["Sun 01 Nov 01:30:00", "Mon 02 Nov 01:30:00"]),
        ("*/30 * * * *", ["Sun 01 Nov 01:00:00", "Sun 01 Nov 01:30:00", "Sun 01 Nov 02:00:00"]),
        ("0 2 * * *", ["Sun 01 Nov 02:00:00", "Mon 02 Nov 02:00:00"]),
    ],
)
def test_repeated_local_time_fires_the_first_time_only(
    expression: str, expected: list[str]
) -> None:
    tz = "America/New_York"
    assert fires(Cron(expression, tz), "2026-11-01T00:59:00", len(expected), tz) == expected


def test_asked_during_the_repetition() -> None:
    tz = "America/New_York"
    for minute in (0, 29, 30, 59):
        during = unix_ms(f"2026-11-01T01:{minute:02}:00", tz, fold=1)
        assert Cron("*/30 * * * *", tz).next_after(during) == unix_ms("2026-11-01T02:00:00", tz)


def test_skipped_day_fires_once_when_the_next_one_starts() -> None:
    # Samoa went over the date line, and had no 30 December.
    tz = "Pacific/Apia"
    assert fires(Cron("0 9,15 * * *", tz), "2011-12-29T12:00:00", 4, tz) == [
        "Thu 29 Dec 15:00:00",
        "Sat 31 Dec 00:00:00",
        "Sat 31 Dec 09:00:00",
        "Sat 31 Dec 15:00:00",
    ]


def test_gap_of_odd_seconds_ends_on_its_second() -> None:
    # Liberia was the last to give up its own mean time, 44 minutes and 30 seconds behind.
    tz = "Africa/Monrovia"
    assert fires(Cron("0 0 * * *", tz), "1972-01-06T12:00:00", 2, tz) == [
        "Fri 07 Jan 00:44:30",
        "Sat 08 Jan 00:00:00",
    ]


# The same, for every transition that the IANA database knows, against a walk minute by minute


@dataclass(frozen=True)
class Transition:
    zone: str
    at: int
    before: int
    after: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """All that matters for a fire time but the date: from which local time to which."""
        return (self.at % DAY, self.before, self.after)


@dataclass(frozen=True)
class Expression:
    """A cron expression, and the minutes of the day that it means."""

    text: str
    minutes: frozenset[int]
    catches_up: bool


def expressions(transition: Transition) -> Iterator[Expression]:
    every_minute = frozenset(range(24 * 60))
    yield Expression("* * * * *", every_minute, False)
    yield Expression("*/7 * * * *", frozenset(m for m in every_minute if m % 60 % 7 == 0), False)
    yield Expression("30 * * * *", frozenset(m for m in every_minute if m % 60 == 30), False)
    yield Expression("*/20 2 * * *", frozenset({120, 140, 160}), False)
    yield Expression(
        "5-55/25 0-23/2 * * *",
        frozenset(h * 60 + m for h in range(0, 24, 2) for m in (5, 30, 55)),
        True,
    )
    # Times of the day at the edges of the gap or the repetition, and inside.
    edges = sorted(
        (transition.at + offset) // 60 for offset in (transition.before, transition.after)
    )
    for minute in (edges[0] - 1, edges[0], edges[0] + 7, edges[1] - 1, edges[1]):
        minute %= 24 * 60
        yield Expression(f"{minute % 60} {minute // 60} * * *", frozenset({minute}), True)


def zone_transitions(name: str, first_year: int, last_year: int) -> list[Transition]:
    """Found by looking at the offset once a day, then by halving."""
    zone = ZoneInfo(name)

    def offset(second: int) -> int:
        shift = datetime.fromtimestamp(second, zone).utcoffset()
        assert shift is not None
        return int(shift.total_seconds())

    start = int(datetime(first_year, 1, 1, tzinfo=UTC).timestamp())
    end = int(datetime(last_year + 1, 1, 1, tzinfo=UTC).timestamp())
    found = []
    days = [(second, offset(second)) for second in range(start, end + 1, DAY)]
    for (low, before), (high, after) in itertools.pairwise(days):
        if before != after:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if offset(middle) == before else (low, middle)
            found.append(Transition(name, high, before, after))
    return found


@cache
def all_transitions() -> list[Transition]:
    """Of each zone; those that have shown the same time all these years are one."""
    zones = {}
    for name in sorted(available_timezones() - {"localtime"}):
        found = zone_transitions(name, YEARS[0], YEARS[-1])
        zones[tuple((each.at, each.before, each.after) for each in found)] = found
    return list(itertools.chain.from_iterable(zones.values()))


def check(transition: Transition) -> None:
    """Compare the fires around a transition with those of a walk through real time."""
    assert transition.at % 60 == 0
    assert abs(transition.after - transition.before) % 60 == 0
    zone = ZoneInfo(transition.zone)
    margin = 3 * HOUR + abs(transition.after - transition.before)
    walk = range(transition.at - margin, transition.at + margin, 60)
    # For each minute of real time, the minutes of the day that the clock showed for the first
    # time, and those that it left out just before. A minute's number goes on over midnight.
    shown: list[tuple[int, int | None, range]] = []
    latest = None
    for second in walk:
        local = datetime.fromtimestamp(second, zone).replace(tzinfo=None)
        number = (local - datetime(1970, 1, 1)) // timedelta(minutes=1)
        if latest is None:
            latest = number - 1
        left_out = range(latest + 1, number)
        shown.append((second, number if number > latest else None, left_out))
        latest = max(latest, number)

    for expression in expressions(transition):
        minutes = expression.minutes
        expected = [
            second * 1000
            for second, number, left_out in shown
            if (number is not None and number % 1440 in minutes)
            or (expression.catches_up and any(each % 1440 in minutes for each in left_out))
        ]
        cron = Cron(expression.text, transition.zone)
        found = []
        at = cron.next_after(walk.start * 1000 - 1)
        while at is not None and at < walk.stop * 1000:
            found.append(at)
            at = cron.next_after(at)
        assert found == expected, (transition, expression.text)
        # From any other moment it is the same.
        for ms in range(walk.start * 1000, (expected or [0])[-1], 17 * 60_000 + 1):
            assert cron.next_after(ms) == next(each for each in expected if each > ms)


@pytest.mark.fault(31)
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_kind_of_transition_fires_as_a_walk_minute_by_minute() -> None:
    kinds = {each.shape: each for each in all_transitions()}
    assert len(kinds) > 50
    for transition in kinds.values():
        check(transition)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("year", YEARS)
def test_each_transition_fires_as_a_walk_minute_by_minute(year: int) -> None:
    of_the_year = [
        each for each in all_transitions() if datetime.fromtimestamp(each.at, UTC).year == year
    ]
    assert len(of_the_year) > 50
    for transition in of_the_year:
        check(transition)


@pytest.mark.slow
@pytest.mark.parametrize(
    "zone",
    [
        "Australia/Lord_Howe",  # half an hour
        "Antarctica/Troll",  # two hours
        "Antarctica/Casey",  # three hours, back and forth
        "Antarctica/Macquarie",
        "Africa/Casablanca",  # off in Ramadan, which the moon decides
        "America/Caracas",  # half an hour, for good
        "Asia/Gaza",
        "Asia/Kathmandu",  # a quarter of an hour
        "Asia/Pyongyang",
        "Europe/Dublin",  # winter is what is saved
        "Pacific/Apia",  # a day
        "Pacific/Kwajalein",
    ],
)
def test_odd_zones_fire_as_a_walk_minute_by_minute(zone: str) -> None:
    for transition in {each.shape: each for each in zone_transitions(zone, 1971, 2037)}.values():
        check(transition)
