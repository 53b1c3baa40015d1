"""The value types: what can be made, what is refused, and that dict forms come back."""

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chasqui.model.job import (
    BackoffSpec,
    MissedFiresPolicy,
    RepeatableMeta,
    RepeatPattern,
)

uints = st.integers(0, 2**64 - 1)
backoffs = st.builds(
    BackoffSpec,
    st.sampled_from(["fixed", "exponential"]),
    uints,
    st.none() | uints,
    st.none() | st.floats(0, allow_infinity=False),
    st.none() | uints,
)
patterns = st.builds(RepeatPattern.cron, st.text(min_size=1), tz=st.none() | st.text()) | st.builds(
    RepeatPattern.every, st.integers(1, 2**64 - 1)
)
policies = st.sampled_from([MissedFiresPolicy.skip(), MissedFiresPolicy.fire_once()]) | st.builds(
    MissedFiresPolicy.fire_all, st.integers(1, 2**32 - 1)
)


@given(backoffs | patterns | policies)
def test_the_dict_form_comes_back_as_the_same_value(value: Any) -> None:
    parsed = type(value).parse(value.to_dict())
    assert parsed == value
    assert hash(parsed) == hash(value)
    assert type(value).parse(value) is value
    assert None not in value.to_dict().values()


@given(backoffs | patterns | policies)
def test_values_can_be_copied_and_pickled(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    assert copy.deepcopy(value) == value


def test_values_are_frozen_and_have_no_dict() -> None:
    meta = RepeatableMeta("k", "j", RepeatPattern.every(5), 7)
    for value in (BackoffSpec.fixed(5), meta.pattern, MissedFiresPolicy.skip(), meta):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, "other")
        assert not hasattr(value, "__dict__")


def test_fields_order_and_repr_are_those_of_chasquimq() -> None:
    assert repr(BackoffSpec("fixed", 5)) == (
        "BackoffSpec(kind='fixed', delay_ms=5, max_delay_ms=None, multiplier=None, jitter_ms=None)"
    )
    assert repr(RepeatPattern("cron", "* * * * *", "UTC")) == (
        "RepeatPattern(kind='cron', expression='* * * * *', tz='UTC', interval_ms=None)"
    )
    assert (
        repr(MissedFiresPolicy("fire-all", 3))
        == "MissedFiresPolicy(kind='fire-all', max_catchup=3)"
    )
    assert [field.name for field in dataclasses.fields(RepeatableMeta)] == [
        "key", "job_name", "pattern", "next_fire_ms",
        "limit", "start_after_ms", "end_before_ms", "missed_fires",
    ]  # fmt: skip


def test_dict_forms() -> None:
    assert BackoffSpec.fixed(5).to_dict() == {"kind": "fixed", "delay_ms": 5}
    assert BackoffSpec.fixed(5, 1).to_dict() == {"kind": "fixed", "delay_ms": 5, "jitter_ms": 1}
    assert BackoffSpec.exponential(5).to_dict() == {
        "kind": "exponential", "delay_ms": 5, "multiplier": 2.0,
    }  # fmt: skip
    assert BackoffSpec.exponential(5, multiplier=3, max_ms=9, jitter_ms=1).to_dict() == {
        "kind": "exponential", "delay_ms": 5, "max_delay_ms": 9, "multiplier": 3.0, "jitter_ms": 1,
    }  # fmt: skip
    assert RepeatPattern.cron("* * * * *").to_dict() == {"kind": "cron", "expression": "* * * * *"}
    assert RepeatPattern.cron("* * * * *", tz="").to_dict()["tz"] == ""
    assert RepeatPattern.every(5).to_dict() == {"kind": "every", "interval_ms": 5}
    assert MissedFiresPolicy.skip().to_dict() == {"kind": "skip"}
    assert MissedFiresPolicy.fire_once().to_dict() == {"kind": "fire-once"}
    assert MissedFiresPolicy.fire_all(3).to_dict() == {"kind": "fire-all", "max_catchup": 3}


def test_an_int_is_a_fixed_backoff() -> None:
    assert BackoffSpec.parse(250) == BackoffSpec.fixed(250)


def test_dict_forms_may_hold_nones_and_what_is_of_another_kind() -> None:
    assert BackoffSpec.parse(
        {"kind": "fixed", "delay_ms": 5, "max_delay_ms": None, "multiplier": None}
    ) == BackoffSpec.fixed(5)
    assert RepeatPattern.parse(
        {"kind": "every", "interval_ms": 5, "expression": None, "tz": "UTC"}
    ) == RepeatPattern.every(5)
    assert MissedFiresPolicy.parse({"kind": "skip", "max_catchup": 3}) == MissedFiresPolicy.skip()


def test_a_multiplier_is_a_float_whatever_was_given() -> None:
    assert type(BackoffSpec.exponential(5, multiplier=2).multiplier) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "backoff.kind is required"),
        ({"kind": "fixed"}, "backoff.delay_ms is required"),
        ({"kind": "bogus", "delay_ms": 5}, "unknown backoff kind 'bogus'"),
        ({"kind": "FIXED", "delay_ms": 5}, "unknown backoff kind 'FIXED'"),
        ({"kind": None, "delay_ms": 5}, "unknown backoff kind None"),
        ({"kind": "fixed", "delay_ms": -1}, "backoff.delay_ms must be a non-negative int"),
        ({"kind": "fixed", "delay_ms": 1.5}, "backoff.delay_ms must be a non-negative int"),
        ({"kind": "fixed", "delay_ms": "5"}, "backoff.delay_ms must be a non-negative int"),
        ({"kind": "fixed", "delay_ms": True}, "backoff.delay_ms must be a non-negative int"),
        ({"kind": "fixed", "delay_ms": 2**64}, "backoff.delay_ms must be a non-negative int"),
        ({"kind": "fixed", "delay_ms": 5, "jitter_ms": -1}, "backoff.jitter_ms must be"),
        ({"kind": "fixed", "delay_ms": 5, "max_delay_ms": "9"}, "backoff.max_delay_ms must be"),
        ({"kind": "fixed", "delay_ms": 5, "multiplier": math.nan}, "multiplier must be finite"),
        ({"kind": "fixed", "delay_ms": 5, "multiplier": math.inf}, "multiplier must be finite"),
        ({"kind": "fixed", "delay_ms": 5, "multiplier": -1}, "multiplier must be finite"),
        ({"kind": "fixed", "delay_ms": 5, "multiplier": "2"}, "multiplier must be a number"),
        ({"kind": "fixed", "delay_ms": 5, "multiplier": True}, "multiplier must be a number"),
        (-1, "backoff.delay_ms must be a non-negative int"),
    ],
)
def test_bad_backoffs(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackoffSpec.parse(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "pattern.kind is required"),
        ({"kind": "x"}, "unknown pattern kind 'x'; expected 'cron' or 'every'"),
        ({"kind": "cron"}, "cron pattern requires `expression`"),
        ({"kind": "cron", "expression": ""}, "cron pattern requires `expression`"),
        ({"kind": "cron", "expression": 5}, "cron pattern requires `expression`"),
        ({"kind": "cron", "expression": "* * * * *", "tz": 5}, "pattern.tz must be a string"),
        ({"kind": "every"}, "pattern.interval_ms is required"),
        ({"kind": "every", "interval_ms": 0}, "pattern.interval_ms must be > 0"),
        ({"kind": "every", "interval_ms": -1}, "pattern.interval_ms must be a non-negative int"),
        ({"kind": "every", "interval_ms": 1.5}, "pattern.interval_ms must be a non-negative int"),
        ({"kind": "every", "interval_ms": True}, "pattern.interval_ms must be a non-negative int"),
    ],
)
def test_bad_patterns(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RepeatPattern.parse(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "missed_fires.kind is required"),
        ({"kind": "x"}, "unknown missed-fires kind 'x'"),
        ({"kind": "fire-all"}, "missed_fires.max_catchup is required when kind is 'fire-all'"),
        ({"kind": "fire-all", "max_catchup": 0}, "max_catchup must be from 1"),
        ({"kind": "fire-all", "max_catchup": 2**32}, "max_catchup must be from 1"),
    ],
)
def test_bad_missed_fires(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MissedFiresPolicy.parse(value)


@pytest.mark.parametrize("most", [True, 1.0, "3", None])
def test_max_catchup_is_an_int(most: Any) -> None:
    with pytest.raises(TypeError, match="max_catchup must be an int"):
        MissedFiresPolicy.fire_all(most)


@pytest.mark.parametrize("value", [True, 1.5, "5", None, [5]])
def test_foreign_types_are_type_errors(value: Any) -> None:
    with pytest.raises(TypeError, match="backoff must be int"):
        BackoffSpec.parse(value)
    with pytest.raises(TypeError, match="repeat must be a RepeatPattern or dict"):
        RepeatPattern.parse(value)
    with pytest.raises(TypeError, match="missed_fires must be a MissedFiresPolicy or dict"):
        MissedFiresPolicy.parse(value)
