"""Options of a bulk read by the core: the same as one by one, wherever they begin to be unusual."""

import gc
import json
from collections import UserDict
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chasqui._core.options import (
    DELAYED,
    RELATIVE,
    UNIQUE,
    draw_delayed_ids,
    job_keys,
    read_options,
)
from chasqui._core.ulid import UlidFactory
from chasqui.model.keys import Keys
from chasqui.producing import job_options

NOW_MS = 1_794_797_194_811
#: The same objects again and again, as most callers have them.
BACKOFFS = (None, 250, {"kind": "fixed", "delay_ms": 9}, {"kind": "sideways"}, {"kind": "fixed"})


class Text(str):
    __slots__ = ()


BAD_IDS = ["", " ", "\t", "a\n", "{a}", "a\x7f", "\u2028", "\ud800", 7, "a" * 257, "é" * 129]
GOOD_IDS = ["a", " a ", "a" * 256, "é", "é" * 128, Text("a")]

OPTIONS = {
    "attempts": st.sampled_from((None, 1, 3, 2**32 - 1, 2**32, 0, -1, True, 3.0, "3", 2**70)),
    "backoff": st.sampled_from(BACKOFFS),
    "delay_ms": st.sampled_from(
        (None, 0, 1, 3_600_000, 2_592_000_000, 2_592_000_001, -1, 2**63, -(2**63), True, 1.5, "1")
    ),
    "job_id": st.sampled_from((None, *GOOD_IDS, *BAD_IDS)),
    "delay": st.just(None),
    "repeat": st.sampled_from((None, {"every_ms": 1000})),
    "speed": st.just(1),
}


def read(entries: list[Any]) -> object:
    """The columns of a bulk, or what is wrong with it."""
    try:
        batch = job_options.many(entries)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return batch.ids, batch.retries, batch.flags, batch.due_ms


plain = st.fixed_dictionaries(
    {"name": st.just("n"), "data": st.just(1)},
    optional={
        "attempts": st.sampled_from((None, 1, 3)),
        "backoff": st.sampled_from(BACKOFFS[:3]),
        "delay_ms": st.sampled_from((None, 0, 1, 3_600_000)),
        "job_id": st.sampled_from((None, "order-1", " a ", "a" * 256)),
    },
)
unusual = st.fixed_dictionaries({"name": st.just("n"), "data": st.just(1)}, optional=OPTIONS)


@given(st.lists(plain, max_size=12), st.lists(unusual, max_size=2), st.lists(plain, max_size=3))
@example(
    [{"name": "n", "data": 1, "attempts": 1}], [{"name": "n", "data": 1, "attempts": True}], []
)
def test_many_are_read_as_one_by_one(
    before: list[dict[str, Any]], between: list[dict[str, Any]], after: list[dict[str, Any]]
) -> None:
    entries = [*before, *between, *after]

    assert read(entries) == read([UserDict(entry) for entry in entries])


@given(st.lists(plain, min_size=2, max_size=12))
def test_the_names_of_options_may_be_other_objects(entries: list[dict[str, Any]]) -> None:
    copied = [{name.encode().decode(): value for name, value in entry.items()} for entry in entries]

    assert read(copied) == read(entries)


def test_entries_from_json_take_the_short_way() -> None:
    text = json.dumps([{"name": "n", "data": 1, "job_id": f"order-{i}"} for i in range(3)])
    ids: list[str | None] = [None] * 3

    read = read_options(json.loads(text), [0, 1, 2], 0, 99, {}, ids, [None] * 3, [0] * 3, [0] * 3)

    assert (read, ids) == (3, ["order-0", "order-1", "order-2"])


def test_a_bulk_holds_what_its_entries_said() -> None:
    entries: list[dict[str, Any]] = [
        {"name": "n", "data": 1, "attempts": 3},
        {"name": "n", "data": 1, "job_id": "a"},
        {"name": "n", "data": 1, "delay_ms": 7},
        {"name": "n", "data": 1, "job_id": "b", "delay_ms": 8, "attempts": 3},
        {"name": "n", "data": 1},
    ]
    batch = job_options.many(entries)

    assert batch.ids == [None, "a", None, "b", None]
    assert batch.flags == [0, UNIQUE, DELAYED | RELATIVE, DELAYED | RELATIVE | UNIQUE, 0]
    assert batch.due_ms == [0, 0, 7, 8, 0]
    assert batch.retries is not None
    assert batch.retries[0] == batch.retries[3] is not None
    assert batch.retries[1] is batch.retries[2] is batch.retries[4] is None


@pytest.mark.parametrize("extra", range(-3, 6))
def test_a_finalizer_that_takes_the_id_away_meanwhile(extra: int) -> None:
    """Whenever it runs, the id is one that was looked at. By the interpreter's release, what is
    allocated on the way may run it or not."""
    entry = {"name": "n", "data": 1, "attempts": 3, "job_id": f"order-{10**19 + extra}"}
    made: list[str] = []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            entry.pop("job_id", None)
            made.extend(f"{{bad}}{i:021d}" for i in range(4))  # where the id was, if it is gone

    ids: list[str | None] = [None]
    retries: list[bytes | None] = [None]
    entries, special, kinds, dues = [entry], [0], [0], [0]
    known: dict[tuple[int | None, int], tuple[bytes | None, object]] = {(3, id(None)): (b"r", None)}
    was_on, threshold = gc.isenabled(), gc.get_threshold()
    gc.disable()
    try:
        Cycle()
        held = [(object(), i) for i in range(3000)]  # no tuple is left to be used again
        gc.set_threshold(gc.get_count()[0] + extra)
        gc.enable()
        read = read_options(entries, special, 0, 99, known, ids, retries, kinds, dues)
        gc.disable()
    finally:
        gc.set_threshold(*threshold)
        if was_on:
            gc.enable()
    del held
    assert (read, ids) in ((1, [f"order-{10**19 + extra}"]), (1, [None]))


def test_only_delayed_jobs_without_an_id_are_given_one() -> None:
    kinds = [0, DELAYED, UNIQUE, DELAYED | UNIQUE, DELAYED | RELATIVE]
    given_ids = [None, None, "a", "b", None]

    ids = draw_delayed_ids(UlidFactory(), NOW_MS, kinds, given_ids)

    assert [ids[0], *ids[2:4]] == [None, "a", "b"]
    first, second = ids[1], ids[4]
    assert first is not None
    assert second is not None
    assert len(first) == 26
    assert first < second
    assert given_ids == [None, None, "a", "b", None]


@pytest.mark.parametrize("is_traced", [False, True])
def test_keys_of_jobs_are_those_of_each(is_traced: bool) -> None:
    keys = Keys("mail")
    kinds = [0, DELAYED, UNIQUE, DELAYED | UNIQUE]
    expected = [
        keys.didx("é"),
        *([keys.trace("é")] if is_traced else ()),
        *(keys.unique("b"), keys.dlid("b"), keys.result("b")),
        keys.didx("c"),
        *([keys.trace("c")] if is_traced else ()),
        *(keys.unique("c"), keys.dlid("c"), keys.result("c")),
    ]

    assert keys.of_jobs(kinds, ["a", "é", "b", "c"], is_traced=is_traced) == expected


@pytest.mark.parametrize("ids", [[], [None], [7]])
def test_a_job_without_an_id_has_no_keys(ids: list[Any]) -> None:
    with pytest.raises((TypeError, IndexError)):
        job_keys([DELAYED], ids, b"", None, b"", b"", b"")
