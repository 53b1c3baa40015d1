"""The commands of the data path, byte for byte; a call that fails writes nothing."""

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import (
    common_name,
    evalsha,
    evalsha_jobs,
    slices_by_size,
    xackdel,
    xadd_event,
    xadd_run_event,
    xreadgroup,
)
from chasqui._core.entry import EntryBuilder
from chasqui._core.envelope import encode_envelope, encode_retry
from chasqui._core.reply import ReplyReader
from chasqui._core.ulid import UlidFactory
from tests.core.record_replies import frame

NOW_MS = 1_794_797_194_811
SHA = b"5" * 40
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ROWS = st.lists(
    st.tuples(
        st.binary(max_size=400),
        TEXT,
        st.none() | TEXT,
        st.sampled_from([None, encode_retry(), encode_retry(7, ("fixed", 80, None, None, 9))]),
    ),
    max_size=12,
)
UNSIGNED = st.integers(0, 2**64 - 1)


def columns(rows: list[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]


@given(ROWS)
def test_a_bulk_is_its_jobs_one_by_one(rows):
    payloads, names, ids, retries = columns(rows)
    entropy = os.urandom(1000)
    bulk = evalsha_jobs(
        *(CommandBuffer(), SHA, [], [], UlidFactory(lambda _: entropy), NOW_MS),
        *(payloads, names, ids, retries),
    )
    ulids, single = UlidFactory(lambda _: entropy), []
    for payload, name, id, retry in rows:
        job = (CommandBuffer(), SHA, [], [], ulids, NOW_MS, [payload], name, [id], [retry])
        single += evalsha_jobs(*job)
    assert bulk == single


@given(ROWS, st.lists(st.binary(max_size=30), max_size=3), st.booleans(), st.booleans(), st.data())
def test_a_script_carries_a_chunk_of_jobs(rows, keys, is_named, is_timed, data):
    payloads, names, ids, retries = columns(rows)
    times = st.lists(UNSIGNED, min_size=len(rows), max_size=len(rows))
    due_ms = data.draw(times) if is_timed else None
    buffer = CommandBuffer()
    answer = evalsha_jobs(
        *(buffer, SHA, keys, [b"a", 7, "x", 1.5], UlidFactory(), NOW_MS),
        *(payloads, names if is_named else None, ids, retries, due_ms),
    )
    words: list[Any] = [b"EVALSHA", SHA, len(keys), *keys, b"a", 7, "x", 1.5]
    for i, (payload, name, _, retry) in enumerate(rows):
        words.append(encode_envelope(answer[i], payload, NOW_MS, 0, retry))
        if is_named:
            words.append(name)
        if due_ms is not None:
            words.append(due_ms[i])
    assert bytes(buffer) == frame(*words)
    assert buffer.commands == 1
    assert all(id in (None, given_id) for id, given_id in zip(ids, answer, strict=True))
    drawn = [id for id, asked in zip(answer, ids, strict=True) if asked is None]
    assert drawn == sorted(set(drawn))


def test_one_name_serves_all():
    buffer = CommandBuffer()
    ids = evalsha_jobs(buffer, SHA, [], [], UlidFactory(), NOW_MS, [b"\xc0"] * 2, "mail")
    words = [word for id in ids for word in (encode_envelope(id, b"\xc0", NOW_MS), "mail")]
    assert bytes(buffer) == frame("EVALSHA", SHA, 0, *words)


def jobs(**changed: Any) -> dict[str, Any]:
    sound = {
        "now_ms": NOW_MS,
        "payloads": [b"\xc0"] * 3,
        "names": ["a", "b", "c"],
        "ids": [None, "id", None],
        "retries": None,
    }
    return sound | changed


WRONG_JOBS = [
    ({"payloads": [b"", b"", "x"]}, TypeError),
    ({"payloads": [b"", b"", None]}, TypeError),
    ({"payloads": [b"", b"", bytearray()]}, TypeError),
    ({"payloads": (b"", b"", b"")}, TypeError),
    ({"payloads": [b""]}, ValueError),
    ({"names": ["a", "b"]}, ValueError),
    ({"names": ["a", "b", b"c"]}, TypeError),
    ({"names": ["a", "b", "\ud800"]}, UnicodeEncodeError),
    ({"ids": [None, None]}, ValueError),
    ({"ids": [None, None, 7]}, TypeError),
    ({"ids": [None, None, "\ud800"]}, UnicodeEncodeError),
    ({"retries": [None, None]}, ValueError),
    ({"retries": [None, None, "x"]}, TypeError),
    ({"now_ms": -1}, OverflowError),
    ({"now_ms": 2**48}, OverflowError),
    ({"ulids": None}, TypeError),
]
IN_EVALSHA = [
    ({"due_ms": [1, 2]}, ValueError),
    ({"due_ms": [1, 2, -3]}, OverflowError),
    ({"due_ms": [1, 2, "3"]}, TypeError),
    ({"keys": None}, TypeError),
    ({"arguments": [None]}, TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error"), WRONG_JOBS + IN_EVALSHA)
def test_a_script_of_jobs_that_fails_writes_nothing(changed, error):
    buffer = CommandBuffer()
    buffer.command("PING")
    sound = {"ulids": UlidFactory(), "keys": [b"k"], "arguments": []}
    with pytest.raises(error):
        evalsha_jobs(buffer, SHA, **(sound | jobs(**changed)))
    assert (bytes(buffer), buffer.commands) == (frame("PING"), 1)


def test_rows_that_are_replaced_while_an_id_is_drawn_are_not_read_after_they_are_gone():
    payloads = [bytes([65 + i]) * 40_000 for i in range(3)]

    def entropy(size: int) -> bytes:
        payloads[:] = [bytes([97 + i]) * 40_000 for i in range(3)]
        return os.urandom(size)

    buffer = CommandBuffer()
    ids = evalsha_jobs(buffer, SHA, [], [], UlidFactory(entropy), NOW_MS, payloads, None)
    envelopes = [encode_envelope(*row, NOW_MS) for row in zip(ids, payloads, strict=True)]
    assert bytes(buffer) == frame("EVALSHA", SHA, 0, *envelopes)


def test_rows_that_are_replaced_by_a_due_time_are_not_read_after_they_are_gone():
    payloads, names = [b"A" * 40_000, b"B" * 40_000], ["n" * 300, "m" * 300]

    class Due:
        def __int__(self) -> int:
            payloads[:] = [b"a" * 40_000, b"b" * 40_000]
            names[:] = ["x" * 300, "y" * 300]
            return 5

    buffer = CommandBuffer()
    evalsha_jobs(
        *(buffer, SHA, [], [], UlidFactory(), NOW_MS, payloads, names),
        *(["i", "j"], None, [Due(), Due()]),
    )
    words: list[Any] = []
    for payload, name, id in zip(payloads, names, "ij", strict=True):
        words += [encode_envelope(id, payload, NOW_MS), name, 5]
    assert bytes(buffer) == frame("EVALSHA", SHA, 0, *words)


def test_rows_that_are_cut_short_while_an_id_is_drawn_are_an_error():
    payloads = [b"\xc0"] * 3

    def entropy(size: int) -> bytes:
        payloads.clear()
        return os.urandom(size)

    buffer = CommandBuffer()
    with pytest.raises(IndexError):
        evalsha_jobs(buffer, SHA, [], [], UlidFactory(entropy), NOW_MS, payloads)
    assert not buffer


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            lambda b: xadd_event(b, b"k", b"e", "i", 1, "n", [b"f", 1.5, "g", 2]),
            "XADD k * e e id i ts 1 n n f 1.5 g 2",
        ),
        (
            lambda b: xadd_event(b, b"k", b"waiting", "id", 2**64 - 1, ""),
            f"XADD k * e waiting id id ts {2**64 - 1}",
        ),
        (lambda b: xackdel(b, b"k", b"g", [b"1-1", b"2-2"]), "XACKDEL k g IDS 2 1-1 2-2"),
        (lambda b: evalsha(b, b"sha", [b"k"], [1, "a"]), "EVALSHA sha 1 k 1 a"),
        (lambda b: evalsha(b, b"sha", (), ()), "EVALSHA sha 0"),
        (lambda b: xreadgroup(b, b"g", b"c", b"k"), "XREADGROUP GROUP g c STREAMS k >"),
        (
            lambda b: xreadgroup(
                b, b"g", b"c", b"k", count=1, block_ms=0, claim_min_idle_ms=30_000, last_id=b"0"
            ),
            "XREADGROUP GROUP g c COUNT 1 BLOCK 0 CLAIM 30000 STREAMS k 0",
        ),
    ],
)
def test_the_other_commands(write, words):
    buffer = CommandBuffer()
    write(buffer)
    assert (bytes(buffer), buffer.commands) == (frame(*words.encode("latin-1").split()), 1)


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (lambda b: xadd_event(b, b"k", b"e", "id", 1, "", ["f", None]), TypeError),
        (lambda b: xadd_event(b, None, b"e", "id", 1, ""), TypeError),
        (lambda b: xadd_event(b, "k", b"e", "id", 1, ""), TypeError),
        (lambda b: xadd_event(b, b"k", b"e", "id", -1, ""), OverflowError),
        (lambda b: xadd_event(b, b"k", b"e", "id", 1, "", ["odd"]), ValueError),
        (lambda b: xackdel(b, b"k", b"g", []), ValueError),
        (lambda b: xackdel(b, b"k", b"g", [b"1-1", None]), TypeError),
        (lambda b: xackdel(b, b"k", b"g", [b"1-1", "2-2"]), TypeError),
        (lambda b: xackdel(b, b"k", None, [b"1-1"]), TypeError),
        (lambda b: xackdel(b, b"k", b"g", [b"1-1", 2]), TypeError),
        (lambda b: evalsha(b, SHA, [None], []), TypeError),
        (lambda b: evalsha(b, SHA, [], [b"x" * 5000, None]), TypeError),
        (lambda b: xreadgroup(b, b"g", b"c", b"k", count=True), TypeError),
        (lambda b: xreadgroup(b, b"g", b"c", b"k", last_id=None), TypeError),
    ],
)
def test_a_command_that_fails_writes_nothing(write, error):
    buffer = CommandBuffer()
    buffer.command("PING")
    with pytest.raises(error):
        write(buffer)
    assert (bytes(buffer), buffer.commands) == (frame("PING"), 1)


#: Those that do not tell when they were made.
OWN_IDS = [
    "an id",
    "x",
    "01ARZ3NDEKTSV4RRFFQ69G5FAU",
    "01arz3ndektsv4rrffq69g5fav0",
    "é" * 13,
    "y" * 26,
]


@pytest.mark.parametrize("job_id", ["01ARZ3NDEKTSV4RRFFQ69G5FAV", *OWN_IDS])
@pytest.mark.parametrize("duration_us", [-1, 0, 10**12])
@pytest.mark.parametrize("name", ["", "mail", "名"])
def test_run_event_is_the_event_that_xadd_event_writes(name: str, duration_us: int, job_id: str):
    envelope = encode_envelope(job_id, b"\xc0", 2**53, 7)
    row = frame("d", envelope, *(("n", name) if name else ()))
    reader = ReplyReader()
    reader.feed(b"*1\r\n*2\r\n$3\r\n1-1\r\n" + row)
    (entry,) = reader.read(EntryBuilder("range"))
    fields = ["attempt", 8] + (["duration_us", duration_us] if duration_us >= 0 else [])
    assert entry.untold_created_ms == (2**53 if job_id in OWN_IDS else None)
    if job_id in OWN_IDS:
        fields += ["created", 2**53]
    fast, plain = CommandBuffer(), CommandBuffer()
    xadd_run_event(fast, b"key", b"completed", entry, 1_794_797_194_811, 8, duration_us)
    xadd_event(plain, b"key", b"completed", job_id, 1_794_797_194_811, name, fields)
    assert bytes(fast) == bytes(plain)
    assert fast.commands == 1


# ── Chunks ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sizes", "most_jobs", "most_bytes", "stops"),
    [
        ([], 3, 10, []),
        ([4, 4], 3, 10, [2]),
        ([4] * 7, 3, 100, [3, 6, 7]),
        ([4, 4, 4, 4], 3, 8, [2, 4]),
        ([11, 1, 9, 1, 30, 30], 3, 10, [1, 3, 4, 5, 6]),
        ([0] * 4, 2, 0, [2, 4]),
    ],
    ids=["none", "one", "by number", "by size", "one that is too large has its own", "empty"],
)
def test_payloads_are_cut_into_chunks(
    sizes: list[int], most_jobs: int, most_bytes: int, stops: list[int]
) -> None:
    parts = slices_by_size([b"x" * size for size in sizes], most_jobs, most_bytes)
    assert parts == [slice(*part) for part in zip([0, *stops], stops, strict=False)]


def test_what_is_no_bytes_is_not_cut() -> None:
    with pytest.raises(TypeError, match=r"payloads\[1\] must be bytes, got str"):
        slices_by_size([b"x", "y"], 3, 10)  # type: ignore[list-item]


@given(st.lists(st.sampled_from(["", "a", "".join(["a"]), "ab", "ä"]), max_size=4))
def test_a_name_that_all_share(names: list[str]) -> None:
    assert common_name(names) == (names[0] if len(set(names)) == 1 else None)


def test_a_name_that_shortens_the_list_it_is_compared_in() -> None:
    class Vandal(str):
        __slots__ = ()

        def __ne__(self, other: object) -> bool:
            names.clear()
            return False

        __hash__ = str.__hash__

    names = ["a", Vandal("a"), "a"]
    with pytest.raises(IndexError):
        common_name(names)
