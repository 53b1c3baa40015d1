"""Stream replies into columns: whole at any cut, nothing left of a reply that broke off."""

import struct
from typing import Any

import pytest

from chasqui._core.columns import ColumnBuilder, Columns
from chasqui._core.envelope import encode_envelope, encode_retry
from chasqui._core.reply import INCOMPLETE, ProtocolError, ReplyError, ReplyReader
from tests.core.record_replies import frame

JOB = encode_envelope("job-1", b"\x01", 1_794_797_194_811, 2, encode_retry(7))
FIELDS = [
    ("event", "text", b"e"),
    ("job_id", "text", b"id"),
    ("created", "ulid", b"id"),
    ("ts", "moment", b"ts"),
    ("attempt", "int32", b"attempt"),
    ("took", "int64", b"took"),
    ("unwanted", "skipped", b"u"),
]
ULID = b"01ARZ3NDEKTSV4RRFFQ69G5FAV"


def entry(entry_id: bytes, *fields: bytes) -> bytes:
    return b"*2\r\n$%d\r\n%b\r\n" % (len(entry_id), entry_id) + frame(*fields)


def reply(*entries: bytes) -> bytes:
    return b"*%d\r\n" % len(entries) + b"".join(entries)


EVENTS = reply(
    entry(b"5-0", b"e", b"active", b"id", ULID, b"ts", b"7", b"attempt", b"1", b"u", b"x"),
    entry(b"6-1", b"e", b"\xff", b"id", b"own", b"ts", b"soon", b"took", b"-9",
          b"x", b"1", b"y", b"2"),
    entry(b"6-2"),
    entry(b"7-0", b"took", b"1", b"took", b"2", b"x", b"1", b"x", b"2", b"id", ULID.lower()),
)  # fmt: skip


def events() -> ColumnBuilder:
    return ColumnBuilder(FIELDS, ("entry_id", "entry_ts", "extra"))


def texts(columns: Columns, name: str) -> list[bytes | None]:
    return unpack(columns.columns[name], columns.rows)


def unpack(buffers: Any, rows: int) -> list[bytes | None]:
    bitmap, ends, data = buffers
    at = struct.unpack(f"<{rows + 1}i", ends)
    assert at[-1] == len(data)
    return [data[at[i] : at[i + 1]] if has(bitmap, i) else None for i in range(rows)]


def numbers(columns: Columns, name: str) -> list[int | None]:
    bitmap, data = columns.columns[name]
    width = {4: "i", 8: "q"}[len(data) // columns.rows]
    values = struct.unpack(f"<{columns.rows}{width}", data)
    return [value if has(bitmap, i) else None for i, value in enumerate(values)]


def has(bitmap: bytes | None, row: int) -> bool:
    return bitmap is None or bool(bitmap[row // 8] >> row % 8 & 1)


def check_events(columns: Columns) -> None:
    assert columns.rows == 4
    assert texts(columns, "entry_id") == [b"5-0", b"6-1", b"6-2", b"7-0"]
    assert numbers(columns, "entry_ts") == [5000, 6000, 6000, 7000]
    assert texts(columns, "event") == [b"active", "\ufffd".encode(), None, None]
    assert texts(columns, "job_id") == [ULID, b"own", None, ULID.lower()]
    drawn = 1_469_922_850_259_000
    assert numbers(columns, "created") == [drawn, None, None, drawn]
    assert numbers(columns, "ts") == [7000, None, None, None]
    assert numbers(columns, "attempt") == [1, None, None, None]
    assert numbers(columns, "took") == [None, -9, None, 1], "the first of its name counts"
    assert "unwanted" not in columns.columns
    ends, names, values = columns.extras
    assert struct.unpack("<5i", ends) == (0, 0, 2, 2, 3)
    assert unpack(names, 3) == [b"x", b"y", b"x"]
    assert unpack(values, 3) == [b"1", b"2", b"1"]


def test_a_reply_is_whole_however_it_is_cut():
    for cut in range(len(EVENTS) + 1):
        reader, builder = ReplyReader(), events()
        reader.feed(EVENTS[:cut])
        answer = reader.read(builder)
        if cut < len(EVENTS):
            assert answer is INCOMPLETE
            reader.feed(EVENTS[cut:])
            answer = reader.read(builder)
        assert answer == (4, b"7-0")
        check_events(builder.take())


def test_what_broke_off_leaves_nothing_behind():
    """The link is lost and the page read again, by the same builder over another link."""
    for cut in range(len(EVENTS)):
        builder = events()
        whole = ReplyReader()
        whole.feed(reply(entry(b"1-0", b"e", b"first", b"z", b"1")))
        assert whole.read(builder) == (1, b"1-0")
        broken = ReplyReader()
        broken.feed(EVENTS[:cut])
        assert broken.read(builder) is INCOMPLETE
        del broken
        again = ReplyReader()
        again.feed(EVENTS)
        assert again.read(builder) == (4, b"7-0")
        assert builder.rows == 5
        columns = builder.take()
        assert texts(columns, "event") == [b"first", b"active", "\ufffd".encode(), None, None]
        assert struct.unpack("<6i", columns.extras[0]) == (0, 1, 1, 3, 3, 4)


def test_pages_are_gathered_until_they_are_taken():
    builder = events()
    for _ in range(2):
        reader = ReplyReader()
        reader.feed(EVENTS + b"*0\r\n")
        reader.read(builder)
        assert reader.read(builder) == (0, None)
        assert builder.size > 0
        check_events(builder.take())
        assert (builder.rows, builder.size) == (0, 0)
    assert texts(builder.take(), "event") == []


JOBS = reply(
    entry(b"1-0", b"d", JOB, b"n", b"mail"),
    entry(b"2-0", b"d", JOB[:9]),
    entry(b"3-0", b"n", b"mail"),
    entry(b"4-0", b"d", JOB, b"d", b"garbage"),
)


def test_envelopes_are_decoded_and_what_is_none_is_kept_aside():
    parts = ("entry_id", "job_id", "payload", "created_at", "attempt", "envelope")
    builder = ColumnBuilder([("name", "text", b"n")], parts)
    reader = ReplyReader()
    reader.feed(JOBS)
    assert reader.read(builder) == (4, b"4-0")
    columns = builder.take()
    assert texts(columns, "name") == [b"mail", None, b"mail", None]
    assert texts(columns, "job_id") == [b"job-1", None, None, b"job-1"]
    assert texts(columns, "payload") == [b"\x01", None, None, b"\x01"]
    assert texts(columns, "envelope") == [JOB, JOB[:9], None, JOB]
    created = 1_794_797_194_811_000
    assert numbers(columns, "created_at") == [created, None, None, created]
    assert numbers(columns, "attempt") == [2, None, None, 2]
    assert columns.retries == {0: (7, None), 3: (7, None)}
    assert columns.corrupt == {1: JOB[:9], 2: b""}
    reader.feed(JOBS)
    reader.read(builder)
    assert columns.corrupt == {1: JOB[:9], 2: b""}, "what was taken is the taker's"


def test_what_is_no_page_comes_as_it_is_or_ends_the_stream():
    reader, builder = ReplyReader(), events()
    reader.feed(b"-LOADING\r\n$-1\r\n:5\r\n")
    assert reader.read(builder) == ReplyError("LOADING")
    assert reader.read(builder) is None
    assert reader.read(builder) == 5
    for wrong in (b"*1\r\n:5\r\n", b"*1\r\n*3\r\n", b"*1\r\n*2\r\n:1\r\n", b"*1\r\n$1\r\nx\r\n",
                  b"*1\r\n*2\r\n$1\r\n1\r\n*3\r\n", b"*1\r\n*2\r\n$1\r\n1\r\n#t\r\n",
                  b"*1\r\n*2\r\n$1\r\n1\r\n*-1\r\n", b"*1\r\n*-1\r\n", b"*1\r\n*4\r\n",
                  ):  # fmt: skip
        broken = ReplyReader()
        broken.feed(wrong)
        with pytest.raises(ProtocolError, match="not a reply of stream entries"):
            broken.read(builder)
        assert builder.rows == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b"0", 0),
        (b"-0", 0),
        (b"9223372036854775807", 2**63 - 1),
        (b"9223372036854775808", None),
        (b"-9223372036854775808", -(2**63)),
        (b"-9223372036854775809", None),
        (b"-9223372036854775807", -(2**63) + 1),
        (b"99999999999999999999", None),
        (b"", None),
        (b"-", None),
        (b"+1", None),
        (b"1.0", None),
        (b" 1", None),
    ],
)
def test_a_number_is_a_decimal_and_nothing_else(text: bytes, number: int | None):
    builder = ColumnBuilder([("n", "int64", b"n"), ("small", "int32", b"n")])
    reader = ReplyReader()
    reader.feed(reply(entry(b"1-0", b"n", text)))
    reader.read(builder)
    columns = builder.take()
    assert numbers(columns, "n") == [number]
    fits = number is not None and -(2**31) <= number < 2**31
    assert numbers(columns, "small") == [number if fits else None]


def test_wrong_kinds_are_refused():
    with pytest.raises(KeyError):
        ColumnBuilder([("n", "number", b"n")])
    builder, reader = events(), ReplyReader()
    reader.feed(EVENTS[:-5])
    reader.read(builder)
    with pytest.raises(RuntimeError, match="in the middle of a reply"):
        builder.take()
