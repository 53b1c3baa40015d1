"""What a bulk is made of is read once, as it was when it was passed."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from chasqui.errors import PayloadTooLargeError
from chasqui.producing import job_options
from chasqui.producing.settings import AddSettings


class Made(Sequence[Mapping[str, Any]]):
    """Makes its entries, and all that is in them, when they are asked for."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: Any) -> Any:
        if i >= len(self):
            raise IndexError(i)
        return {"name": "n", "data": i, "attempts": 3, "backoff": {"kind": "fixed", "delay_ms": i}}


def test_each_entry_has_its_own_backoff_however_it_is_made() -> None:
    batch = job_options.many(Made())
    assert batch.retries is not None
    delays = [msgpack.unpackb(retry)[1][1] for retry in batch.retries if retry is not None]
    assert delays == list(range(8))


def test_entries_that_share_a_backoff() -> None:
    shared = {"kind": "fixed", "delay_ms": 9}
    rows = [{"name": "n", "data": i, "attempts": 1 + i % 2, "backoff": shared} for i in range(6)]
    batch = job_options.many(rows)
    assert batch.retries is not None
    told = [msgpack.unpackb(retry) for retry in batch.retries if retry is not None]
    assert [attempts for attempts, _ in told] == [1, 2] * 3
    assert {tuple(backoff[:2]) for _, backoff in told} == {("fixed", 9)}


@pytest.mark.parametrize("wrong", [True, "3", 3.0])
def test_a_shared_backoff_hides_no_wrong_attempts(wrong: object) -> None:
    shared = {"kind": "fixed", "delay_ms": 9}
    rows: list[dict[str, Any]] = [
        {"name": "n", "data": 1, "attempts": 1, "backoff": shared},
        {"name": "n", "data": 1, "backoff": shared},
        {"name": "n", "data": 1, "attempts": wrong, "backoff": shared},
    ]
    with pytest.raises(TypeError, match=r"jobs\[2\].*attempts"):
        job_options.many(rows)


def test_a_key_that_clears_the_list_it_is_in() -> None:
    rows: list[dict[Any, Any]] = []

    class Hostile(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            rows.clear()
            return False

    rows += [{Hostile("name"): "n", "data": i} for i in range(1000)]
    with pytest.raises(ValueError, match=r"jobs\[0\]: 'name' is missing"):
        job_options.many(rows)


@pytest.mark.parametrize("entry", [5, None, "name", object(), [("name", "n")]])
def test_an_entry_that_is_no_dict(entry: Any) -> None:
    with pytest.raises(TypeError, match=r"jobs\[1\] must be a dict"):
        job_options.many([{"name": "n", "data": 1}, entry])


def test_what_is_too_large_in_a_bulk_is_named_by_index_and_place() -> None:
    rows = [{"name": "n", "data": 1}, {"name": "n", "data": {"blob": bytes(1 << 20)}}]
    with pytest.raises(PayloadTooLargeError) as caught:
        job_options.many(rows)
    assert str(caught.value).startswith('jobs[1]: the payload up to data["blob"] takes 1048')


def test_who_waits_for_room_without_a_limit_waits_for_nothing() -> None:
    AddSettings(None, "wait").check_fits(job_options.many([{"name": "n", "data": 1}]))


class Vague(tzinfo):
    """A zone that does not say how far off it is: such a time is naive, by Python's rule."""

    def utcoffset(self, _: datetime | None) -> timedelta | None:
        return None

    def dst(self, _: datetime | None) -> timedelta | None:
        return None

    def tzname(self, _: datetime | None) -> str | None:
        return None


def test_a_naive_time_is_utc_with_or_without_a_zone() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    told = job_options.unix_ms(moment)
    assert job_options.unix_ms(moment.replace(tzinfo=None)) == told
    assert job_options.unix_ms(moment.replace(tzinfo=Vague())) == told


@pytest.mark.parametrize(("given", "kept"), [(1, 1), (1.0, 1), (1.1, 2), (1.9, 2)])
def test_an_id_is_unique_for_no_less_than_was_asked(given: float, kept: int) -> None:
    assert AddSettings().options(given).unique_for_s == kept
