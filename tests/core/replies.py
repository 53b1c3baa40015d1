"""The recorded replies, and how to read and compare what becomes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from chasqui._core.entry import Entry, EntryBuilder
from chasqui._core.reply import INCOMPLETE, ProtocolError, Push, ReplyError, ReplyReader

SHAPES = ("streams", "range")


class Recording(NamedTuple):
    """What a server once sent: one reply, or several with out-of-band messages."""

    source: str
    shape: str | None
    data: bytes


def recordings() -> list[Recording]:
    """All of replies.json."""
    rows = json.loads((Path(__file__).parent / "replies.json").read_text())
    return [Recording(row["source"], row["shape"], row["bytes"].encode("latin-1")) for row in rows]


def builder_of(shape: str | None) -> EntryBuilder | None:
    """A fresh builder of a shape; None stands for plain replies."""
    return None if shape is None else EntryBuilder(shape)  # type: ignore[arg-type]


def read_all(reader: ReplyReader, builder: EntryBuilder | None) -> list[Any]:
    """Every reply that is whole, comparable; a protocol error ends them."""
    replies = []
    try:
        while (reply := reader.read(builder)) is not INCOMPLETE:
            replies.append(comparable(reply))
    except ProtocolError as error:
        replies.append(("ProtocolError", str(error)))
    return replies


def wrong_cuts(
    recording: Recording, shape: str | None, make_reader: Callable[[], Any] = ReplyReader
) -> list[int]:
    """Where a reply must not be cut in two, for then it gives other objects."""
    whole = ReplyReader()
    whole.feed(recording.data)
    expected = read_all(whole, builder_of(shape))
    builder = builder_of(shape)
    wrong = []
    for cut in range(len(recording.data) + 1):
        reader = make_reader()
        reader.feed(recording.data[:cut])
        replies = read_all(reader, builder)
        reader.feed(recording.data[cut:])
        if replies + read_all(reader, builder) != expected:
            wrong.append(cut)
    return wrong


def comparable(value: Any) -> Any:
    """The same value in types that compare by content and tell an int from a bool."""
    if isinstance(value, Entry):
        return (
            "Entry",
            *(value.id, value.envelope, value.name, value.extra, value.fault, value.detail),
            *(value.idle_ms, value.deliveries),
            *(value.job_id, value.created_at_ms, value.attempt, value.retry, value.max_attempts),
            value.payload if value.fault is None else None,
        )
    if isinstance(value, dict):
        return ("dict", [(comparable(key), comparable(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [comparable(item) for item in value])
    return (type(value).__name__, repr(value))


def entries_of(shape: str, reply: Any) -> Any:
    """What an entry builder should give for a plain reply: the slow way, written for reading."""
    if reply is None or isinstance(reply, (ReplyError, Push)):
        return comparable(reply)
    if shape == "streams":
        pairs = reply.items() if isinstance(reply, dict) else reply
        return comparable_entries([row for _, rows in pairs for row in rows])
    return comparable_entries(reply)


def comparable_entries(rows: list[Any]) -> Any:
    """`comparable` of the entries that these rows hold."""
    return ("list", [comparable(None) if row is None else _entry(*row) for row in rows])


def _entry(id: bytes, fields: list[bytes] | None, idle_ms: int = 0, deliveries: int = 0) -> Any:
    envelope, name, extra = None, "", {}
    for field, value in zip((fields or [])[::2], (fields or [])[1::2], strict=True):
        if field == b"d" and envelope is None:
            envelope = value
        elif field == b"n":
            name = value.decode("utf-8", "replace")
        else:
            extra[field] = value
    fault, detail = None, None
    job_id, payload, created_at_ms, attempt, retry = "", None, 0, 0, None
    if fields is None:
        fault = "gone"
    elif envelope is None:
        fault, detail = "malformed", "missing or non-bytes payload field"
    else:
        try:
            job_id, payload, created_at_ms, attempt, *rest = msgpack.unpackb(envelope)
            retry = _retry(*rest[0]) if rest else None
        except (ValueError, TypeError):
            fault, detail = "decode_failed", _detail_of(envelope)
    return (
        *("Entry", id, envelope, name, extra or None, fault, detail, idle_ms, deliveries),
        *(job_id, created_at_ms, attempt, retry, retry and retry[0], payload),
    )


def _retry(max_attempts: int | None, backoff: list[Any] | None) -> Any:
    if max_attempts is None and backoff is None:
        return None
    return max_attempts, None if backoff is None else tuple(backoff)


def _detail_of(envelope: bytes) -> str:
    """The words are the decoder's own business; that they are the same everywhere is not."""
    from chasqui._core.envelope import EnvelopeError, decode_envelope

    try:
        decode_envelope(envelope)
    except EnvelopeError as error:
        return str(error)
    raise AssertionError(f"{envelope!r} decodes after all")
