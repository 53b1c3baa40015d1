"""Every recorded reply gives the same objects however the network cuts it."""

import pytest

from chasqui._core.entry import EntryBuilder
from chasqui._core.reply import INCOMPLETE, Push, ReplyError, ReplyReader
from tests.core.memory import assert_keeps_nothing
from tests.core.replies import (
    Recording,
    builder_of,
    comparable,
    entries_of,
    read_all,
    recordings,
    wrong_cuts,
)

RECORDINGS = recordings()
ENTRIES = [recording for recording in RECORDINGS if recording.shape is not None]


def whole(recording: Recording, shape: str | None) -> list[object]:
    reader = ReplyReader()
    reader.feed(recording.data)
    return read_all(reader, builder_of(shape))


def test_recordings_are_many_and_of_every_type():
    assert len(RECORDINGS) >= 500
    assert {recording.data[:1] for recording in RECORDINGS} >= {*map(bytes, zip(b"+-:$*_#,(=%~>|"))}
    assert {recording.source for recording in ENTRIES} >= {
        f"{kind} RESP{version}"
        for kind in ("valkey-9", "redis-6.2", "redis-8.6")
        for version in (2, 3)
    }


@pytest.mark.slow
@pytest.mark.fault(45)
@pytest.mark.parametrize("shaped", [False, True], ids=["plain", "shaped"])
def test_a_reply_cut_anywhere_gives_the_same_objects(shaped: bool):
    for recording in RECORDINGS:
        assert wrong_cuts(recording, recording.shape if shaped else None) == [], recording


@pytest.mark.fault(45)
@pytest.mark.parametrize("shaped", [False, True], ids=["plain", "shaped"])
def test_replies_fed_byte_by_byte_through_one_reader_are_the_same(shaped: bool):
    reader = ReplyReader()
    for recording in RECORDINGS:
        shape = recording.shape if shaped else None
        builder = builder_of(shape)
        replies = []
        for byte in recording.data:
            reader.feed(bytes([byte]))
            replies += read_all(reader, builder)
        assert replies == whole(recording, shape), recording


def test_all_replies_in_one_chunk_are_the_same():
    reader = ReplyReader()
    reader.feed(b"".join(recording.data for recording in RECORDINGS))
    for recording in RECORDINGS:
        for expected in whole(recording, recording.shape):
            assert comparable(reader.read(builder_of(recording.shape))) == expected
    assert reader.read() is INCOMPLETE


def test_entries_are_what_the_plain_reply_says():
    for recording in ENTRIES:
        reader = ReplyReader()
        reader.feed(recording.data)
        expected = entries_of(recording.shape, reader.read())
        assert whole(recording, recording.shape) == [expected], recording


def test_plain_replies_are_those_of_hiredis_py():
    hiredis = pytest.importorskip("hiredis")

    def ours(value: object) -> object:
        """hiredis-py's objects as ours would be."""
        if isinstance(value, hiredis.ReplyError):
            return ReplyError(str(value))
        if isinstance(value, hiredis.PushNotification):
            return Push(map(ours, value))
        if isinstance(value, (list, set)):
            return [ours(item) for item in value]
        if isinstance(value, dict):
            return {ours(key): ours(item) for key, item in value.items()}
        return value

    for recording in RECORDINGS:
        if recording.data[:1] in b"(=|":  # as str, with its format, and not dropped: their choice
            continue
        theirs = hiredis.Reader(notEnoughData=INCOMPLETE)
        theirs.feed(recording.data)
        replies = []
        while (reply := theirs.gets()) is not INCOMPLETE:
            replies.append(comparable(ours(reply)))
        assert whole(recording, None) == replies, recording


@pytest.mark.parametrize("shaped", [False, True], ids=["plain", "shaped"])
def test_a_reader_dropped_at_any_byte_leaves_nothing_behind(shaped: bool):
    builders = {shape: EntryBuilder(shape) for shape in ("streams", "range")}

    def drop_everywhere() -> None:
        for recording in RECORDINGS[::7]:
            builder = builders[recording.shape] if shaped and recording.shape else None
            for cut in range(len(recording.data)):
                reader = ReplyReader()
                reader.feed(recording.data[:cut])
                while reader.read(builder) is not INCOMPLETE:
                    pass

    assert_keeps_nothing(drop_everywhere, calls=2)
