"""The reply reader at its edges: limits, broken input, builders that change hands."""

import gc
import re
import sys
import tracemalloc
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chasqui._core.entry import EntryBuilder
from chasqui._core.reply import INCOMPLETE, ProtocolError, Push, ReplyError, ReplyReader
from tests.core.memory import rss_bytes
from tests.core.replies import SHAPES, builder_of, comparable, read_all, recordings

CUT_ENTRY = b"*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nd\r\n"


def read(data: bytes, builder: EntryBuilder | None = None, **limits: int) -> object:
    reader = ReplyReader(**limits)
    reader.feed(data)
    return reader.read(builder)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"+OK\r\n", b"OK"),
        (b"-NOGROUP no such group\r\n", ReplyError("NOGROUP no such group")),
        (b":-9223372036854775808\r\n", -(2**63)),
        (b"$0\r\n\r\n", b""),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"_\r\n", None),
        (b"#t\r\n", True),
        (b"#f\r\n", False),
        (b",-1.5e3\r\n", -1500.0),
        (b",inf\r\n", float("inf")),
        (b"(-123456789012345678901234567890\r\n", -123456789012345678901234567890),
        (b"=7\r\ntxt:a\r\n\r\n", b"a\r\n"),
        (b"~2\r\n:1\r\n:1\r\n", [1, 1]),
        (b"%2\r\n+a\r\n*1\r\n:1\r\n:2\r\n%0\r\n", {b"a": [1], 2: {}}),
        (b"%2\r\n+a\r\n*1\r\n:1\r\n+a\r\n:2\r\n", {b"a": 2}),
        (b">2\r\n+invalidate\r\n_\r\n", Push([b"invalidate", None])),
        (b"|1\r\n+ttl\r\n*1\r\n%1\r\n+a\r\n+b\r\n:7\r\n", 7),
        (b"|1\r\n+a\r\n:1\r\n|1\r\n+b\r\n:2\r\n*0\r\n", []),
        (b"*2\r\n-ERR inside\r\n:1\r\n", [ReplyError("ERR inside"), 1]),
    ],
)
def test_every_type(data: bytes, value: object):
    assert comparable(read(data)) == comparable(value)
    assert read(data[:-1]) is INCOMPLETE


def test_error_replies_are_values():
    error = read(b"-MOVED 1 host:1\r\n")
    assert (error.code, error.message) == ("MOVED", "MOVED 1 host:1")
    assert error == ReplyError("MOVED 1 host:1")
    assert error != ReplyError("MOVED 2 host:1")
    assert {error: 1}[ReplyError("MOVED 1 host:1")] == 1
    assert repr(error) == "ReplyError('MOVED 1 host:1')"
    assert read(b"-\xff\r\n").message == "�"


@pytest.mark.fault(44)
@pytest.mark.parametrize(
    "data",
    [
        b"@",
        b"\0",
        b":1x\r\n",
        b":9223372036854775808\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b"$5\rx",
        b"$536870913\r\n",
        b"$99999999999999999999",
        b"$3\r\nabcX\n",
        b"$3\r\nabcdef\r\n",
        b"*-2\r\n",
        b"*2147483647\r\n",
        b"*16777217\r\n",
        b"%16777217\r\n",
        b"%9223372036854775807\r\n",
        b"*1\r\n" * 17,
        b"%1\r\n+k\r\n" * 17,
        b"%1\r\n*1\r\n:1\r\n:2\r\n",
        b"*1\r\n|1\r\n+a\r\n+b\r\n",
        b"*1\r\n>1\r\n+a\r\n",
        b"=3\r\nabc\r\n",
        b"=4\r\nabcd\r\n",
        b"(\r\n",
        b"(-\r\n",
        b"(" + b"9" * 4001 + b"\r\n",
        b"#x\r\n",
        b"_x\r\n",
        b",1.5x\r\n",
        b"+" + b"x" * 65_537 + b"\r\n",
        b"+" + b"x" * 65_539,
        b"*" + b"1" * 65_539,
        b"-a\nb\r\n",
    ],
    ids=lambda data: repr(data[:24]),
)
@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_broken_input_ends_the_stream_for_good(data: bytes, shape: str | None):
    for step in (len(data), 1 if len(data) < 5000 else 4096):
        reader, builder = ReplyReader(), builder_of(shape)
        chunks = [data[at : at + step] for at in range(0, len(data), step)]
        with pytest.raises(ProtocolError) as raised:
            feed_all(reader, chunks, builder)
        for use in (reader.read, reader.read, partial(reader.feed, b"+OK\r\n")):
            with pytest.raises(ProtocolError, match=f"^{re.escape(str(raised.value))}$"):
                use()
        assert isinstance(read(b"-ERR\r\n", builder), ReplyError)


def feed_all(reader: ReplyReader, chunks: list[bytes], builder: EntryBuilder | None) -> None:
    for chunk in chunks:
        reader.feed(chunk)
        reader.read(builder)


def test_what_is_just_within_the_limits_is_read():
    assert read(b"*1\r\n" * 16 + b":1\r\n") == [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]
    assert read(b"+" + b"x" * 65_536 + b"\r\n") == b"x" * 65_536
    assert read(b"(" + b"9" * 4000 + b"\r\n") == int("9" * 4000)
    assert read(b"$5\r\n12345\r\n", max_bulk_bytes=5) == b"12345"
    assert read(b"*2\r\n:1\r\n:2\r\n", max_elements=2) == [1, 2]
    with pytest.raises(ProtocolError, match="more than 5 bytes"):
        read(b"$6\r\n123456\r\n", max_bulk_bytes=5)
    with pytest.raises(ProtocolError, match="out of range"):
        read(b"*3\r\n:1\r\n:2\r\n:3\r\n", max_elements=2)


@pytest.mark.parametrize(
    "limits", [{"max_elements": 0}, {"max_elements": 2**31}, {"max_bulk_bytes": 0}]
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]):
    with pytest.raises(ValueError, match="max_"):
        ReplyReader(**limits)


@pytest.mark.fault(46)
@pytest.mark.parametrize(
    "bomb",
    [
        b"*16777216\r\n",
        b"%16777216\r\n",
        b"*1\r\n*2\r\n$1\r\nk\r\n*16777216\r\n",
        b"$536870912\r\n",
        b"*16777216\r\n" * 16,
        b"+" + b"x" * 60_000,
    ],
    ids=lambda bomb: repr(bomb[:24]),
)
@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_a_header_alone_allocates_next_to_nothing(bomb: bytes, shape: str | None):
    before = rss_bytes()
    tracemalloc.start()
    try:
        reader = ReplyReader()
        reader.feed(bomb)
        try:
            assert reader.read(builder_of(shape)) is INCOMPLETE
        except ProtocolError:
            assert shape is not None  # not a shape of entries
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    assert rss_bytes() - before < 4 << 20


def test_a_long_string_is_kept_once_and_a_half_while_it_comes():
    size = 8 << 20
    reader = ReplyReader()
    reader.feed(b"$%d\r\n" % size)
    before = rss_bytes()
    chunk = bytes(65_536)
    for _ in range(size // len(chunk)):
        reader.feed(chunk)
        assert reader.read() is INCOMPLETE
    assert rss_bytes() - before < 2 * size
    reader.feed(b"\r\n")
    assert reader.read() == bytes(size)


@pytest.mark.fault(45)
@given(st.binary(max_size=300), st.sampled_from([None, *SHAPES]), st.data())
@example(b"*1\r\n*2\r\n", "range", None)
def test_arbitrary_bytes_give_the_same_however_they_are_cut(noise, shape, data):
    once = ReplyReader()
    once.feed(noise)
    cut = data.draw(st.integers(0, len(noise))) if data else 3
    twice, builder = ReplyReader(), builder_of(shape)
    twice.feed(noise[:cut])
    replies = read_all(twice, builder)
    if not (replies and replies[-1][0] == "ProtocolError"):
        twice.feed(noise[cut:])
        replies += read_all(twice, builder)
    expected = read_all(once, builder_of(shape))
    assert [reply[0] for reply in replies] == [reply[0] for reply in expected]
    assert [r for r in replies if r[0] != "ProtocolError"] == [
        r for r in expected if r[0] != "ProtocolError"
    ]


RECORDED = recordings()


@pytest.mark.fault(44)
@given(
    st.sampled_from(RECORDED),
    st.lists(st.tuples(st.integers(0, 1499), st.binary(max_size=4)), min_size=1, max_size=4),
    st.sampled_from([None, *SHAPES]),
)
def test_damaged_replies_are_read_or_refused_within_four_times_their_size(recording, hits, shape):
    damaged = bytearray(recording.data)
    for at, patch in hits:
        damaged[at % len(damaged) : at % len(damaged) + len(patch)] = patch
    builder = builder_of(shape)
    tracemalloc.start()
    try:
        reader = ReplyReader()
        reader.feed(damaged)
        kept = []
        try:
            while (reply := reader.read(builder)) is not INCOMPLETE:
                kept.append(reply)
        except ProtocolError:
            pass
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A nil of three bytes becomes eight of a list, an empty map 64: per line, not per promise.
    assert size <= 4 * len(damaged) + 250 * damaged.count(b"\r\n") + 8000


def test_the_builder_of_a_dropped_reader_serves_the_next_one():
    for shape in SHAPES:
        builder = EntryBuilder(shape)
        for cut in range(1, len(CUT_ENTRY)):
            try:
                read(CUT_ENTRY[:cut], builder)  # the reader is gone at once
            except ProtocolError:
                assert shape != "range"
            assert read(b"-NOGROUP\r\n", builder) == ReplyError("NOGROUP")
            assert read(b"*-1\r\n", builder) is None


def test_a_broken_stream_leaves_nothing_of_it_in_the_builder():
    builder = EntryBuilder("range")
    with pytest.raises(ProtocolError):
        read(b"*2\r\n*2\r\n$3\r\n7-7\r\n*0\r\n*2\r\n$3\r\n1-1\r\n@", builder)
    assert read(b":1\r\n", builder) == 1
    assert read(b"*0\r\n", builder) == []


def test_one_builder_does_not_serve_two_readers_at_once():
    first, second, builder = ReplyReader(), ReplyReader(), EntryBuilder("range")
    first.feed(CUT_ENTRY)
    assert first.read(builder) is INCOMPLETE
    second.feed(b"*0\r\n")
    with pytest.raises(RuntimeError, match="another reader"):
        second.read(builder)
    first.feed(b"$1\r\n\xc1\r\n")
    assert [entry.fault for entry in first.read(builder)] == ["decode_failed"]
    assert second.read(builder) == []


def test_a_reply_keeps_the_builder_it_began_with():
    reader, entries = ReplyReader(), EntryBuilder("range")
    assert reader.read(entries) is INCOMPLETE  # nothing has come: this binds nobody
    reader.feed(b"*0\r\n")
    assert reader.read() == []
    assert reader.read(entries) is INCOMPLETE
    reader.feed(b"*1\r\n:1\r\n+OK\r\n" + CUT_ENTRY)
    assert reader.read() == [1]
    assert reader.read(entries) == b"OK"
    assert reader.read(entries) is INCOMPLETE
    reader.feed(b"$1\r\n\xc1\r\n")
    assert [entry.id for entry in reader.read()] == [b"1-1"]


def test_out_of_band_messages_between_entries_are_pushes():
    reader, entries = ReplyReader(), EntryBuilder("range")
    push = b">2\r\n+message\r\n*1\r\n*2\r\n:1\r\n:2\r\n"
    reader.feed(push + b"|1\r\n+a\r\n+b\r\n" + b"*1\r\n*2\r\n$3\r\n1-1\r\n*0\r\n" + push)
    assert comparable(reader.read(entries)) == comparable(Push([b"message", [[1, 2]]]))
    assert [entry.fault for entry in reader.read(entries)] == ["malformed"]
    assert isinstance(reader.read(entries), Push)


def test_the_chunk_is_let_go_when_it_has_been_read():
    chunk = bytearray(b"+OK\r\n" * 10_000)
    reader = ReplyReader()
    reader.feed(chunk)
    assert reader.read() == b"OK"
    with pytest.raises(BufferError):
        chunk.clear()  # still lent
    while reader.read() is not INCOMPLETE:
        pass
    chunk.clear()
    chunk += b"$9\r\nabc"
    reader.feed(chunk)
    del reader
    chunk.clear()


def test_chunks_that_nobody_read_are_not_lost():
    reader = ReplyReader()
    for number in range(1000):
        reader.feed(b":%d\r\n" % number)
    assert [reader.read() for _ in range(1000)] == list(range(1000))
    assert reader.read() is INCOMPLETE
    assert not INCOMPLETE
    assert repr(INCOMPLETE) == "INCOMPLETE"


@pytest.mark.parametrize("chunk", [None, "text", 5, memoryview(b"abcd")[::2]])
def test_a_chunk_must_be_bytes(chunk: object):
    reader = ReplyReader()
    with pytest.raises((TypeError, BufferError)):
        reader.feed(chunk)
    reader.feed(b"+OK\r\n")
    assert reader.read() == b"OK"


def test_a_finalizer_that_runs_inside_read_cannot_come_in():
    reader, seen = ReplyReader(), []

    class Meddler:
        def __del__(self):
            try:
                seen.append(reader.read())
            except RuntimeError as error:
                seen.append(str(error))

    reader.feed(b"*20000\r\n" + b"*1\r\n:1\r\n" * 20_000)
    threshold = gc.get_threshold()
    gc.disable()
    for _ in range(50):
        meddler = Meddler()
        meddler.me = meddler
    del meddler
    gc.set_threshold(100)
    gc.enable()
    try:
        reply = reader.read()
    finally:
        gc.set_threshold(*threshold)
    assert reply == [[1]] * 20_000
    if sys.version_info < (3, 12):  # later ones collect only between bytecodes
        assert seen == ["the reader is in use: it takes one call at a time"] * 50
