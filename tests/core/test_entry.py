"""Stream replies into entries: shapes, faults, and what an entry that cannot run still tells."""

import pytest

from chasqui._core.entry import Entry, EntryBuilder
from chasqui._core.envelope import encode_envelope, encode_retry
from chasqui._core.reply import ProtocolError, ReplyReader
from tests.core.record_replies import frame

ENVELOPE = encode_envelope("job-1", b"\x01", 1_794_797_194_811, 2, encode_retry(7))
SIZE = len(ENVELOPE)


def read(data: bytes, shape: str, **limits: int):
    reader = ReplyReader()
    reader.feed(data)
    return reader.read(EntryBuilder(shape, **limits))


def entry_of(*fields: bytes, **limits: int) -> Entry:
    (entry,) = read(b"*1\r\n*2\r\n$3\r\n1-1\r\n" + frame(*fields), "range", **limits)
    return entry


def test_a_sound_entry_tells_everything():
    entry = entry_of(b"d", ENVELOPE, b"n", "ünï".encode(), b"x", b"1", b"y", b"2")
    assert (entry.id, entry.name, entry.fault, entry.detail) == (b"1-1", "ünï", None, None)
    assert (entry.job_id, entry.payload, entry.attempt) == ("job-1", b"\x01", 2)
    assert (entry.created_at_ms, entry.retry, entry.max_attempts) == (1794797194811, (7, None), 7)
    assert entry.extra == {b"x": b"1", b"y": b"2"}
    assert entry.envelope == ENVELOPE
    assert entry.with_attempt(300) == encode_envelope(
        *("job-1", b"\x01", 1_794_797_194_811, 300, encode_retry(7))
    )
    assert repr(entry) == "Entry(id=b'1-1', name='ünï', job_id='job-1', fault=None)"


@pytest.mark.parametrize(
    ("fields", "fault", "detail"),
    [
        ([b"n", b"mail"], "malformed", "missing or non-bytes payload field"),
        ([], "malformed", "missing or non-bytes payload field"),
        ([b"d", b""], "decode_failed", "cut short (at byte 0)"),
        ([b"d", ENVELOPE + b"\0"], "decode_failed", f"bytes after the envelope (at byte {SIZE})"),
        ([b"d", ENVELOPE[:9]], "decode_failed", "promises more bytes than are left (at byte 9)"),
        ([b"d", b"\xc4" * 101], "oversize_payload", None),
    ],
)  # fmt: skip
def test_a_faulty_entry_says_why_and_has_no_parts(fields, fault, detail):
    entry = entry_of(*fields, max_envelope_bytes=100)
    assert (entry.fault, entry.detail) == (fault, detail)
    assert (entry.job_id, entry.attempt, entry.created_at_ms) == ("", 0, 0)
    assert (entry.retry, entry.max_attempts) == (None, None)
    assert entry.envelope == (fields[1] if fields[:1] == [b"d"] else None)
    with pytest.raises(ValueError, match="no readable envelope"):
        _ = entry.payload
    with pytest.raises(ValueError, match="no readable envelope"):
        entry.with_attempt(1)


def test_the_limit_counts_the_envelope_and_takes_what_just_fits():
    assert entry_of(b"d", ENVELOPE, max_envelope_bytes=SIZE).fault is None
    assert entry_of(b"d", ENVELOPE, max_envelope_bytes=SIZE - 1).fault == "oversize_payload"


def test_of_what_begins_beyond_the_limit_of_a_reply_only_the_id_is_kept():
    one = b"*2\r\n$3\r\n1-%d\r\n" + frame(b"d", ENVELOPE, b"x", b"1").replace(b"%", b"%%")
    data = b"*5\r\n" + b"".join(one % n for n in range(5))
    reader, builder = ReplyReader(), EntryBuilder("range", max_bytes=2 * SIZE)
    for _ in range(2):
        reader.feed(data)
        entries = reader.read(builder)
        assert [entry.id for entry in entries] == [b"1-%d" % n for n in range(5)]
        assert [entry.fault for entry in entries] == [None, None, "left", "left", "left"]
        assert {entry.envelope for entry in entries[2:]} == {None}
        assert {entry.extra for entry in entries[2:]} == {None}
        assert (builder.left, builder.largest) == (3, SIZE)
    reader.feed(b"*1\r\n" + one % 9)
    (entry,) = reader.read(builder)
    assert (entry.fault, builder.left) == (None, 0)


def test_one_entry_is_kept_however_large():
    assert entry_of(b"d", ENVELOPE, max_bytes=1).fault is None


def test_an_entry_deleted_while_pending_is_gone():
    (entry,) = read(b"*1\r\n*2\r\n$1\r\nk\r\n*1\r\n*2\r\n$3\r\n1-1\r\n*-1\r\n", "streams")
    assert (entry.id, entry.fault, entry.detail, entry.envelope) == (b"1-1", "gone", None, None)
    assert read(b"*2\r\n*-1\r\n$-1\r\n", "range") == [None, None]


def test_the_first_envelope_counts_and_the_last_name():
    entry = entry_of(b"n", b"a", b"d", ENVELOPE, b"d", b"other", b"n", b"b")
    assert (entry.envelope, entry.name, entry.extra) == (ENVELOPE, "b", {b"d": b"other"})


def test_idle_time_and_deliveries_come_with_claim():
    reply = b"*1\r\n*2\r\n$1\r\nk\r\n*1\r\n*4\r\n$3\r\n1-1\r\n*0\r\n:12\r\n:3\r\n"
    (entry,) = read(reply, "streams")
    assert (entry.idle_ms, entry.deliveries) == (12, 3)


@pytest.mark.parametrize(
    ("idle_ms", "deliveries", "is_new"), [(0, 0, True), (12, 1, False), (12, 0, False)]
)
def test_what_was_handed_back_is_not_new(idle_ms, deliveries, is_new):
    """Its delivery does not count, and it may be in hand all the same."""
    envelope = encode_envelope("job-1", b"\x01", 1_794_797_194_811, 0)
    fields = b"*2\r\n$1\r\nd\r\n$%d\r\n%b\r\n" % (len(envelope), envelope)
    numbers = b":%d\r\n:%d\r\n" % (idle_ms, deliveries)
    (entry,) = read(
        b"*1\r\n*2\r\n$1\r\nk\r\n*1\r\n*4\r\n$3\r\n1-1\r\n" + fields + numbers, "streams"
    )
    assert entry.is_new is is_new


def test_a_nil_among_entries_is_none():
    nothing, entry = read(b"*2\r\n*-1\r\n*2\r\n$3\r\n1-1\r\n*0\r\n", "range")
    assert (nothing, entry.id) == (None, b"1-1")


@pytest.mark.parametrize(
    ("shape", "reply"),
    [
        ("range", b"*1\r\n:1\r\n"),
        ("range", b"*1\r\n$3\r\n1-1\r\n"),
        ("range", b"*1\r\n*1\r\n$3\r\n1-1\r\n"),
        ("range", b"*1\r\n*3\r\n$3\r\n1-1\r\n"),
        ("range", b"*1\r\n*2\r\n$-1\r\n"),
        ("range", b"*1\r\n*2\r\n+1-1\r\n"),
        ("range", b"*1\r\n*2\r\n$3\r\n1-1\r\n*1\r\n"),
        ("range", b"*1\r\n*2\r\n$3\r\n1-1\r\n%1\r\n"),
        ("range", b"*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nd\r\n$-1\r\n"),
        ("range", b"*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nd\r\n*0\r\n"),
        ("range", b"*1\r\n*4\r\n$3\r\n1-1\r\n*0\r\n$1\r\n1\r\n"),
        ("range", b"*1\r\n*4\r\n$3\r\n1-1\r\n*0\r\n,1.5\r\n"),
        ("range", b"*1\r\n*4\r\n$3\r\n1-1\r\n*0\r\n#t\r\n"),
        ("range", b"*1\r\n-ERR inside\r\n"),
        ("streams", b"*1\r\n*3\r\n"),
        ("streams", b"*1\r\n*2\r\n*0\r\n"),
        ("streams", b"*1\r\n*2\r\n$1\r\nk\r\n$1\r\nx\r\n"),
        ("streams", b"%1\r\n:1\r\n"),
        ("streams", b"%1\r\n$1\r\nk\r\n_\r\n"),
    ],
)
def test_other_shapes_are_refused(shape: str, reply: bytes):
    with pytest.raises(ProtocolError, match="not a reply of stream entries"):
        read(reply, shape)


@pytest.mark.parametrize("shape", ["", "Streams", "list"])
def test_an_unknown_shape_is_refused(shape: str):
    with pytest.raises(ValueError, match="shape must be one of streams, range, not"):
        EntryBuilder(shape)
    with pytest.raises(TypeError):
        EntryBuilder.__new__(EntryBuilder)


def test_an_entry_made_by_hand_holds_nothing():
    entry = Entry()
    assert (entry.job_id, entry.retry, entry.attempt) == ("", None, 0)
    for use in (lambda: entry.payload, lambda: entry.with_attempt(1)):
        with pytest.raises(ValueError, match="no readable envelope"):
            use()
