"""Repeat specs: their bytes, what is refused, and which fires they owe."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chasqui.model.job import MissedFiresPolicy, RepeatPattern
from chasqui.timed.cron import Cron
from chasqui.timed.fire_plan import MAX_FIRES_PER_PLAN, FirePlan, plan_fires
from chasqui.timed.spec import RepeatSpec, RepeatSpecError

NOW = 1_794_797_194_823
SKIP = MissedFiresPolicy.skip()
ONCE = MissedFiresPolicy.fire_once()
SECONDLY = RepeatPattern.every(1000)
VALUE = b"\x81\xa1z\x01"

#: Captured from chasquimq 1.3.0.
VECTORS = {
    vector["key"]: (vector["score"], bytes.fromhex(vector["hash"]["spec"]))
    for vector in json.loads(
        Path(__file__).parents[1].joinpath("core", "vectors.json").read_text()
    )["repeat"]
}


def every(interval_ms: int = 1000, **fields: Any) -> RepeatSpec:
    return RepeatSpec.make("tick", RepeatPattern.every(interval_ms), VALUE, **fields)


def cron(expression: str, tz: str | None = None, **fields: Any) -> RepeatSpec:
    return RepeatSpec.make("tick", RepeatPattern.cron(expression, tz=tz), VALUE, **fields)


# Bytes


@pytest.mark.parametrize(
    "spec",
    [
        RepeatSpec.make("cr2", RepeatPattern.cron("*/5 * * * * *"), VALUE),
        RepeatSpec.make("ev", RepeatPattern.every(5000), VALUE, missed_fires=ONCE),
        RepeatSpec.make("ev2", RepeatPattern.every(60000), VALUE),
        RepeatSpec.make(
            "cr",
            RepeatPattern.cron("0 2 * * *", tz="America/New_York"),
            VALUE,
            missed_fires=MissedFiresPolicy.fire_all(5),
        ),
        RepeatSpec.make(
            "lim",
            RepeatPattern.every(1000),
            b"\x91\x01",
            limit=3,
            start_after_ms=1_900_000_000_000,
            end_before_ms=2_000_000_000_000,
        ),
    ],
    ids=lambda spec: spec.job_name,
)
def test_spec_has_the_bytes_of_chasquimq(spec: RepeatSpec) -> None:
    _, data = VECTORS[spec.key]
    assert spec.encode() == data
    assert RepeatSpec.decode(data) == spec


@given(
    st.builds(
        RepeatSpec,
        key=st.text(max_size=20),
        job_name=st.text(max_size=20),
        pattern=st.one_of(
            st.builds(RepeatPattern.every, st.integers(1, 2**64 - 1)),
            st.builds(RepeatPattern.cron, st.text(min_size=1), tz=st.none() | st.text(max_size=8)),
        ),
        payload=st.binary(max_size=300),
        limit=st.none() | st.integers(0, 2**64 - 1),
        start_after_ms=st.none() | st.integers(0, 2**64 - 1),
        end_before_ms=st.none() | st.integers(0, 2**64 - 1),
        fired=st.integers(0, 2**64 - 1),
        missed_fires=st.sampled_from([None, ONCE])
        | st.builds(MissedFiresPolicy.fire_all, st.integers(1, 2**32 - 1)),
    )
)
def test_decode_reads_what_encode_wrote(spec: RepeatSpec) -> None:
    assert RepeatSpec.decode(spec.encode()) == spec


def test_retry_is_not_part_of_the_bytes() -> None:
    spec = every(retry=b"\x92\x03\xc0")
    assert spec.encode() == every().encode()
    assert RepeatSpec.decode(spec.encode(), spec.retry) == spec


def fields_of(spec: RepeatSpec) -> list[Any]:
    fields: list[Any] = msgpack.unpackb(spec.encode())
    return fields


def test_decode_takes_older_and_newer_forms() -> None:
    fields = fields_of(every())
    assert RepeatSpec.decode(msgpack.packb(fields[:7])) == every()
    assert RepeatSpec.decode(msgpack.packb([*fields, "Skip", {"more": 1}])) == every()
    assert RepeatSpec.decode(msgpack.packb([*fields, {"FireAll": [0]}])) == every()


def test_skipping_is_the_default_and_not_written() -> None:
    assert every(missed_fires=SKIP) == every()
    assert every().missed_fires is None


@pytest.mark.parametrize(
    ("index", "value", "told"),
    [
        (0, None, "key must be a string, got None"),
        (1, 5, "job_name must be a string, got 5"),
        (2, {"Lunar": [1]}, r"unknown pattern \{'Lunar': \[1\]\}"),
        (2, {"Cron": ["* * * * *"]}, "unknown pattern"),
        (2, {"Every": [0]}, "pattern.interval_ms must be > 0"),
        (2, {"Every": ["5"]}, "pattern.interval_ms must be a non-negative int"),
        (2, {"Cron": [5, None]}, "requires `expression`"),
        (2, {"Cron": ["* * * * *", 5]}, "pattern.tz must be a string"),
        (3, "text", "payload is not a bin that holds a bin"),
        (3, b"\x01", "payload is not a bin that holds a bin"),
        (3, b"\xc4\xff", "not a repeat spec"),
        (4, -1, "limit must be a non-negative int, got -1"),
        (4, True, "limit must be a non-negative int, got True"),
        (5, 1.5, "start_after_ms must be a non-negative int, got 1.5"),
        (6, "x" * 99, "end_before_ms must be a non-negative int, got 'xxx.*\\.\\.\\.$"),
        (7, None, "fired must be a non-negative int, got None"),
        (8, "FireTwice", "unknown missed_fires 'FireTwice'"),
        (8, {"FireAll": [-1]}, "max_catchup must be from 1"),
        (8, {"FireAll": ["5"]}, "max_catchup must be an int"),
    ],
)
def test_decode_says_what_it_cannot_read(index: int, value: object, told: str) -> None:
    fields = [*fields_of(every()), "FireOnce"]
    fields[index] = value
    with pytest.raises(RepeatSpecError, match=told):
        RepeatSpec.decode(msgpack.packb(fields))


@pytest.mark.parametrize(
    "data", [b"", b"\xc0", b"\x90", b"\x98", b"\x81\xc0\xc0", b"\xdd\xff\xff\xff\xff", b"\x91" * 99]
)
def test_decode_refuses_other_bytes(data: bytes) -> None:
    with pytest.raises(RepeatSpecError):
        RepeatSpec.decode(data)


@given(st.binary(max_size=60), st.integers(0, 80), st.integers(0, 80))
def test_decode_survives_damage(junk: bytes, start: int, length: int) -> None:
    data = cron("0 2 * * *", "Europe/London", missed_fires=ONCE).encode()
    with contextlib.suppress(RepeatSpecError):
        RepeatSpec.decode(data[:start] + junk + data[start + length :])


# Keys


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        (every(60_000), "tick::every:60000"),
        (cron("* * * * *"), "tick::cron:* * * * *:UTC"),
        (cron("* * * * *", ""), "tick::cron:* * * * *:"),
        (cron("@daily", "Asia/Tokyo"), "tick::cron:@daily:Asia/Tokyo"),
        (RepeatSpec.make("tick", RepeatPattern.every(1), VALUE, key="own"), "own"),
    ],
)
def test_key_is_made_of_name_and_pattern_unless_given(spec: RepeatSpec, key: str) -> None:
    assert spec.key == key


# The first fire, and what is refused


def test_interval_first_fires_one_interval_after_now_or_the_start() -> None:
    assert every(5000).first_fire_ms(NOW) == NOW + 5000
    assert every(5000, start_after_ms=NOW - 1).first_fire_ms(NOW) == NOW + 5000
    score, data = VECTORS["lim::every:1000"]
    assert RepeatSpec.decode(data).first_fire_ms(NOW) == score == 1_900_000_001_000


def test_cron_first_fires_on_the_whole_second_where_chasquimq_has_a_stray_part() -> None:
    for key in ("cr2::cron:*/5 * * * * *:UTC", "cr::cron:0 2 * * *:America/New_York"):
        score, data = VECTORS[key]
        assert RepeatSpec.decode(data).first_fire_ms(NOW) == score // 1000 * 1000


def test_cron_first_fires_after_the_start() -> None:
    start = 1_900_000_800_000
    assert cron("*/20 * * * *", start_after_ms=start).first_fire_ms(NOW) == start + 1_200_000


@pytest.mark.parametrize(
    ("pattern", "fields", "told"),
    [
        (RepeatPattern.cron("61 * * * *"), {}, "cron expression '61 .*: bad minute '61'"),
        (RepeatPattern.cron("0 0 30 2 *"), {}, "cron expression '0 0 30 2 .*' never fires"),
        (RepeatPattern.cron("* * * * *", tz="Mars/X"), {}, "unknown tz 'Mars/X'"),
        (RepeatPattern.every(2**64 - 1), {}, "has no fire that can be scheduled"),
        (SECONDLY, {"limit": 0}, "limit must be at least 1, or None for no limit; got 0"),
        (SECONDLY, {"limit": -1}, "limit must be a non-negative int, got -1"),
        (SECONDLY, {"limit": True}, "limit must be a non-negative int, got True"),
        (SECONDLY, {"start_after_ms": -1}, "start_after_ms must be a non-negative int, got -1"),
        (SECONDLY, {"start_after_ms": 2**64 - 1}, "has no fire that can be scheduled"),
        (SECONDLY, {"end_before_ms": 1.5}, "end_before_ms must be a non-negative int, got 1.5"),
        (
            SECONDLY,
            {"start_after_ms": 9, "end_before_ms": 8},
            "end_before_ms 8 is before start_after_ms 9",
        ),
        (SECONDLY, {"key": "a{b"}, "key must hold no braces or control characters, got 'a{b'"),
        (SECONDLY, {"key": "a\n"}, "key must hold no braces or control characters"),
        (SECONDLY, {"key": "é" * 513}, "key takes more than 1024 bytes"),
        (SECONDLY, {"key": 5}, "key must be a string, got 5"),
        (SECONDLY, {"job_name": "n}"}, "key must hold no braces or control characters, got 'n}::"),
    ],
)
def test_spec_that_cannot_be_is_refused(
    pattern: RepeatPattern, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        RepeatSpec.make(**{"job_name": "tick", "pattern": pattern, "payload": VALUE, **fields})


def test_end_before_the_first_fire_is_refused() -> None:
    told = f"end_before_ms {NOW} is before the first fire, {NOW + 1000}"
    with pytest.raises(ValueError, match=told):
        every(end_before_ms=NOW).first_fire_ms(NOW)
    with pytest.raises(ValueError, match=f"end_before_ms {NOW + 1} is before the first fire"):
        cron("@daily", start_after_ms=NOW, end_before_ms=NOW + 1).first_fire_ms(NOW)


def test_end_is_the_last_moment_at_which_it_may_fire() -> None:
    assert every(end_before_ms=NOW + 1000).first_fire_ms(NOW) == NOW + 1000
    assert every(end_before_ms=2000).next_fire_ms(1000) == 2000
    assert every(end_before_ms=1999).next_fire_ms(1000) is None


# Plans


def test_not_due_yet() -> None:
    assert plan_fires(every(), 5000, 4999, 0) == FirePlan([], 5000)


@pytest.mark.parametrize("policy", [SKIP, ONCE, MissedFiresPolicy.fire_all(3)])
def test_late_by_less_than_an_interval_is_no_missed_fire(policy: MissedFiresPolicy) -> None:
    for late in (0, 1, 999):
        plan = plan_fires(every(missed_fires=policy), 5000, 5000 + late, 0)
        assert plan == FirePlan([5000], 6000)


@pytest.mark.parametrize(
    ("policy", "times"),
    [
        (SKIP, []),
        (ONCE, [5000]),
        (MissedFiresPolicy.fire_all(9), [5000, 6000, 7000, 8000]),
        (MissedFiresPolicy.fire_all(4), [5000, 6000, 7000, 8000]),
        (MissedFiresPolicy.fire_all(3), [5000, 6000, 7000]),
        (MissedFiresPolicy.fire_all(1), [5000]),
    ],
)
def test_missed_fires_go_by_the_policy(policy: MissedFiresPolicy, times: list[int]) -> None:
    for now in (8000, 8999):
        assert plan_fires(every(missed_fires=policy), 5000, now, 0) == FirePlan(times, 9000)
        per_second = cron("* * * * * *", missed_fires=policy)
        assert plan_fires(per_second, 5000, now, 0) == FirePlan(times, 9000)


def test_fires_are_missed_as_soon_as_two_are_due() -> None:
    assert plan_fires(every(), 5000, 5999, 0) == FirePlan([5000], 6000)
    assert plan_fires(every(), 5000, 6000, 0) == FirePlan([], 7000)


@pytest.mark.parametrize("spec", [every(), cron("* * * * * *")], ids=["every", "cron"])
@pytest.mark.parametrize(
    ("led_since", "times"),
    [(0, [8000]), (5000, [8000]), (7999, [8000]), (8000, []), (8500, []), (9999, [])],
)
def test_of_skipped_fires_the_last_one_is_fired_if_it_came_while_a_scheduler_led(
    spec: RepeatSpec, led_since: int, times: list[int]
) -> None:
    for now in (8000, 8999):
        plan = plan_fires(spec, 5000, now, 0, led_since_ms=led_since)
        assert plan == FirePlan(times, 9000)


@pytest.mark.parametrize("spec", [every, functools.partial(cron, "* * * * * *")])
def test_the_last_fire_keeps_to_limit_and_end(spec: Callable[..., RepeatSpec]) -> None:
    assert plan_fires(spec(limit=3), 5000, 8500, 2, led_since_ms=0) == FirePlan([8000], None)
    assert plan_fires(spec(limit=4), 5000, 8500, 2, led_since_ms=0) == FirePlan([8000], 9000)
    for end, last in ((5999, 5000), (6000, 6000), (8000, 8000), (8999, 8000)):
        plan = plan_fires(spec(end_before_ms=end), 5000, 8500, 0, led_since_ms=0)
        assert plan == FirePlan([last], None)
        late = plan_fires(spec(end_before_ms=end), 5000, 8500, 0, led_since_ms=last)
        assert late == FirePlan([], None)


def test_of_an_uneven_pattern_the_last_fire_is_found() -> None:
    spec = cron("0 9-17 * * *")
    evening_ms = NOW // 86_400_000 * 86_400_000 + 17 * 3_600_000
    for hours in (0, 5, 12, 15):
        plan = plan_fires(
            spec, evening_ms - 3 * 86_400_000, evening_ms + hours * 3_600_000, 0, led_since_ms=0
        )
        assert plan.fire_times_ms == [evening_ms]


def test_cron_written_by_chasquimq_loses_its_stray_milliseconds_and_no_fire() -> None:
    spec = cron("* * * * * *", missed_fires=MissedFiresPolicy.fire_all(9))
    assert plan_fires(spec, 5823, 5900, 0) == FirePlan([5823], 6000)
    assert plan_fires(spec, 5823, 8100, 0) == FirePlan([5823, 6000, 7000, 8000], 9000)
    spec = cron("* * * * * *")
    assert plan_fires(spec, 5823, 6100, 0, led_since_ms=5822) == FirePlan([6000], 7000)


@pytest.mark.parametrize(
    ("fired", "plan"),
    [
        (0, FirePlan([5000, 6000, 7000, 8000], 9000)),
        (5, FirePlan([5000, 6000, 7000, 8000], 9000)),
        (6, FirePlan([5000, 6000, 7000, 8000], None)),
        (9, FirePlan([5000], None)),
        (10, FirePlan([], None)),
        (11, FirePlan([], None)),
    ],
)
def test_limit_ends_a_spec(fired: int, plan: FirePlan) -> None:
    spec = every(limit=10, missed_fires=MissedFiresPolicy.fire_all(9))
    assert plan_fires(spec, 5000, 8500, fired) == plan


def test_skipped_fires_do_not_count_towards_the_limit() -> None:
    assert plan_fires(every(limit=1), 5000, 8500, 0) == FirePlan([], 9000)


def test_limit_of_zero_from_elsewhere_is_none() -> None:
    spec = dataclasses.replace(every(), limit=0)
    assert RepeatSpec.decode(spec.encode()) == spec
    assert plan_fires(spec, 5000, 5000, 10**9) == FirePlan([5000], 6000)


@pytest.mark.parametrize(
    ("end", "policy", "plan"),
    [
        (5999, SKIP, FirePlan([], None)),
        (5999, ONCE, FirePlan([5000], None)),
        (7000, MissedFiresPolicy.fire_all(9), FirePlan([5000, 6000, 7000], None)),
        (8999, MissedFiresPolicy.fire_all(9), FirePlan([5000, 6000, 7000, 8000], None)),
        (9000, MissedFiresPolicy.fire_all(9), FirePlan([5000, 6000, 7000, 8000], 9000)),
        (4999, ONCE, FirePlan([], None)),
    ],
)
def test_end_ends_a_spec(end: int, policy: MissedFiresPolicy, plan: FirePlan) -> None:
    assert plan_fires(every(end_before_ms=end, missed_fires=policy), 5000, 8500, 0) == plan


def test_last_fire_of_a_pattern_is_not_skipped() -> None:
    last_day_ms = 253_402_214_400_000  # of the year 9999
    assert plan_fires(cron("@daily"), last_day_ms, last_day_ms + 10**9, 0) == FirePlan(
        [last_day_ms], None
    )


def test_cron_that_cannot_be_read_is_a_value_error() -> None:
    pattern = RepeatPattern.cron("* * * * * * 2030")
    spec = RepeatSpec.decode(dataclasses.replace(every(), pattern=pattern).encode())
    with pytest.raises(ValueError, match="years are not supported"):
        plan_fires(spec, 5000, 5000, 0)


@pytest.mark.parametrize("pattern", [RepeatPattern.every(1), RepeatPattern.cron("* * * * * *")])
def test_spec_years_behind_is_planned_in_few_steps(
    pattern: RepeatPattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    next_after = Cron.next_after

    def counted(self: Cron, unix_ms: int) -> int | None:
        nonlocal asked
        asked += 1
        return next_after(self, unix_ms)

    monkeypatch.setattr(Cron, "next_after", counted)
    behind = NOW - 20 * 366 * 86_400_000
    for policy, count in (
        (SKIP, 0),
        (ONCE, 1),
        (MissedFiresPolicy.fire_all(7), 7),
        (MissedFiresPolicy.fire_all(2**32 - 1), MAX_FIRES_PER_PLAN),
    ):
        spec = RepeatSpec.make("t", pattern, VALUE, missed_fires=policy)
        asked = 0
        plan = plan_fires(spec, behind, NOW, 0)
        assert len(plan.fire_times_ms) == count
        assert plan.next_ms is not None
        assert NOW < plan.next_ms <= NOW + 1000
        assert asked <= count + 2
    spec = RepeatSpec.make("t", pattern, VALUE)
    asked = 0
    plan = plan_fires(spec, behind, NOW, 0, led_since_ms=behind)
    assert NOW - 1000 < plan.fire_times_ms[0] <= NOW
    assert asked <= 34


def test_plan_in_steps_ends_where_the_plan_does() -> None:
    plan = FirePlan([1, 2, 3, 4, 5], 9)
    assert list(plan.steps(2)) == [FirePlan([1, 2], 3), FirePlan([3, 4], 5), FirePlan([5], 9)]
    assert list(plan.steps(5)) == [plan]
    assert list(FirePlan([], 9).steps(2)) == [FirePlan([], 9)]


@given(
    interval=st.integers(50, 5000),
    waits=st.lists(st.integers(0, 20_000), min_size=1, max_size=20),
    most=st.integers(1, 50),
    is_cron=st.booleans(),
)
def test_fire_all_fires_every_fire_time_once_whenever_the_scheduler_comes(
    interval: int, waits: list[int], most: int, is_cron: bool
) -> None:
    pattern = RepeatPattern.cron("*/3 * * * * *") if is_cron else RepeatPattern.every(interval)
    policy = MissedFiresPolicy.fire_all(2**32 - 1)
    spec = RepeatSpec.make("t", pattern, VALUE, missed_fires=policy)
    now = NOW
    due = spec.first_fire_ms(now)
    fired: list[int] = []
    for wait in waits:
        now += wait
        for step in plan_fires(spec, due, now, len(fired)).steps(most):
            assert len(step.fire_times_ms) <= most
            fired += step.fire_times_ms
            assert step.next_ms is not None
            due = step.next_ms
        assert due > now
    fire_times = []
    fire_time = spec.first_fire_ms(NOW)
    while fire_time <= now:
        fire_times.append(fire_time)
        following = spec.next_fire_ms(fire_time)
        assert following is not None
        fire_time = following
    assert fired == fire_times
