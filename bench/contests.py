"""The same work twice: by the core, and in Python with msgpack, python-ulid and hiredis-py.

Both sides of a contest start from the same bytes or values and end with the same ones, which is
checked before anything is measured.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import hiredis
import msgpack
import ulid

from chasqui._core.backoff import backoff_ms
from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import (
    evalsha_jobs,
    xackdel,
    xadd_event,
    xreadgroup,
)
from chasqui._core.entry import EntryBuilder
from chasqui._core.envelope import (
    check_msgpack,
    decode_delayed_member,
    decode_envelope,
    encode_delayed_member,
    encode_envelope,
    encode_retry,
)
from chasqui._core.reply import ReplyReader
from chasqui._core.ulid import UlidFactory

COUNT = 1000
NOW_MS = 1_794_797_194_811
KEY = b"{chasqui:bench}:stream"
PAYLOAD = msgpack.packb({"to": "user@example.com", "n": 123})
IDS = [str(ulid.ULID()) for _ in range(COUNT)]
BACKOFF = ("exponential", 250, 10_000, 3.0, 50)
ENVELOPE = msgpack.packb([IDS[0], PAYLOAD, NOW_MS, 1, [7, BACKOFF]])


class Contest(NamedTuple):
    """One kind of work and its two ways."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    #: What must be equal on both sides: the work's outcome, or what stands for it.
    ours_seen: Callable[[], Any]
    theirs_seen: Callable[[], Any]
    #: Jobs or calls in one round.
    count: int = 1
    #: The ratio that it has to reach.
    target: float | None = None


def contest(
    name: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    count: int = 1,
    target: float | None = None,
) -> Contest:
    """A contest whose outcomes compare as they are."""
    return Contest(name, ours, theirs, ours, theirs, count, target)


# ── Commands ─────────────────────────────────────────────────────────────────────────────────────

BUFFER, ULIDS = CommandBuffer(), UlidFactory()
SHA = b"5" * 40


def add_ours(ids: list[str] | None = None) -> CommandBuffer:
    BUFFER.clear()
    evalsha_jobs(BUFFER, SHA, [KEY], [7, "welcome"], ULIDS, NOW_MS, [PAYLOAD] * COUNT, None, ids)
    return BUFFER


def add_theirs(ids: list[str] | None = None) -> bytes:
    words: list[Any] = ["EVALSHA", SHA, 1, KEY, 7, "welcome"]
    for i in range(COUNT):
        id = str(ulid.ULID()) if ids is None else ids[i]
        words.append(msgpack.packb([id, PAYLOAD, NOW_MS, 0]))
    return hiredis.pack_command(tuple(words))


ENTRY_IDS = [b"1794797194831-%d" % i for i in range(COUNT)]


def ack_ours() -> bytes:
    BUFFER.clear()
    xackdel(BUFFER, KEY, b"default", ENTRY_IDS)
    return bytes(BUFFER)


def ack_theirs() -> bytes:
    return hiredis.pack_command(("XACKDEL", KEY, b"default", b"IDS", COUNT, *ENTRY_IDS))


def event_ours() -> bytes:
    BUFFER.clear()
    xadd_event(BUFFER, KEY, b"active", IDS[0], NOW_MS, "welcome", [b"attempt", 1])
    return bytes(BUFFER)


def event_theirs() -> bytes:
    head = ("XADD", KEY, "*", "e", "active", "id", IDS[0], "ts", NOW_MS)
    return hiredis.pack_command((*head, "n", "welcome", "attempt", 1))


def group_ours() -> bytes:
    BUFFER.clear()
    xreadgroup(BUFFER, b"default", b"worker-1", KEY, count=256, block_ms=5000)
    return bytes(BUFFER)


def group_theirs() -> bytes:
    head = ("XREADGROUP", "GROUP", b"default", b"worker-1", "COUNT", 256, "BLOCK", 5000)
    return hiredis.pack_command((*head, "STREAMS", KEY, ">"))


# ── Replies ──────────────────────────────────────────────────────────────────────────────────────


class PythonEntry(NamedTuple):
    """What a queue in Python would make of an entry: the cheapest class that has names."""

    id: bytes
    name: str
    idle_ms: int
    deliveries: int
    job_id: str
    payload: bytes
    created_at_ms: int
    attempt: int


def reply_of(head: bytes, is_claim: bool) -> bytes:
    """XREADGROUP's answer of COUNT jobs."""
    rows = []
    for entry_id, id in zip(ENTRY_IDS, IDS, strict=True):
        envelope = msgpack.packb([id, PAYLOAD, NOW_MS, 0])
        fields = hiredis.pack_command((b"d", envelope, b"n", b"welcome"))
        row = b"$%d\r\n%b\r\n%b" % (len(entry_id), entry_id, fields)
        rows.append(b"*4\r\n%b:0\r\n:1\r\n" % row if is_claim else b"*2\r\n" + row)
    return head + b"$%d\r\n%b\r\n*%d\r\n" % (len(KEY), KEY, COUNT) + b"".join(rows)


RESP2_CLAIM = reply_of(b"*1\r\n*2\r\n", True)
RESP2 = reply_of(b"*1\r\n*2\r\n", False)
RESP3 = reply_of(b"%1\r\n", True)
READER, BUILDER = ReplyReader(), EntryBuilder("streams")
HIREDIS = hiredis.Reader()


def entries_ours(reply: bytes) -> Callable[[], Any]:
    def read() -> Any:
        READER.feed(reply)
        return READER.read(BUILDER)

    return read


def fields_ours(reply: bytes) -> Callable[[], Any]:
    def read() -> Any:
        READER.feed(reply)
        return [
            (e.id, e.name, e.idle_ms, e.deliveries, e.job_id, e.payload, e.created_at_ms, e.attempt)
            for e in READER.read(BUILDER)
        ]

    return read


def entries_theirs(reply: bytes) -> Callable[[], Any]:
    def read() -> Any:
        HIREDIS.feed(reply)
        streams = HIREDIS.gets()
        (rows,) = streams.values() if isinstance(streams, dict) else (streams[0][1],)
        entries = []
        for row in rows:
            id, flat, idle_ms, deliveries = row if len(row) == 4 else (*row, 0, 0)
            fields = dict(zip(flat[::2], flat[1::2], strict=False))
            entries.append(
                PythonEntry(
                    *(id, fields[b"n"].decode(), idle_ms, deliveries),
                    *msgpack.unpackb(fields[b"d"]),
                )
            )
        return entries

    return read


def plain_ours() -> Any:
    READER.feed(RESP2_CLAIM)
    return READER.read()


def plain_theirs() -> Any:
    HIREDIS.feed(RESP2_CLAIM)
    return HIREDIS.gets()


# ── Envelopes, ids, backoff ──────────────────────────────────────────────────────────────────────

MEMBER = encode_delayed_member("welcome", ENVELOPE)


def decode_ours() -> Any:
    envelope = decode_envelope(ENVELOPE)
    head = (envelope.id, envelope.payload, envelope.created_at_ms, envelope.attempt)
    return *head, envelope.retry


def decode_theirs() -> Any:
    id, payload, created_at_ms, attempt, (max_attempts, backoff) = msgpack.unpackb(ENVELOPE)
    return id, payload, created_at_ms, attempt, (max_attempts, tuple(backoff))


def member_theirs() -> Any:
    size = int.from_bytes(MEMBER[:4], "little")
    return MEMBER[4 : 4 + size].decode(), MEMBER[4 + size :]


def backoff_theirs() -> int:
    wait = min(100 * 2.0 ** (9 - 1), 30_000)
    return int(wait + 0.5 * 100)


def is_ulid(id: str) -> bool:
    return len(ulid.ULID.from_str(id).bytes) == 16


def reading(title: str, reply: bytes) -> list[Contest]:
    fields, theirs = fields_ours(reply), entries_theirs(reply)
    return [
        Contest(
            f"read {COUNT} entries, {title}",
            *(entries_ours(reply), theirs, fields, theirs, COUNT, 3),
        ),
        contest(f"… and look at every field, {title}", fields, theirs, COUNT),
    ]


CONTESTS: list[Contest] = [
    Contest(
        f"add {COUNT} jobs: one EVALSHA",
        *(add_ours, add_theirs, lambda: bytes(add_ours(IDS)), lambda: add_theirs(IDS)),
        *(COUNT, 8),
    ),
    *reading("RESP2 with CLAIM", RESP2_CLAIM),
    *reading("RESP2", RESP2),
    *reading("RESP3 with CLAIM", RESP3),
    contest("the same reply as plain lists", plain_ours, plain_theirs, COUNT),
    contest(f"XACKDEL of {COUNT} ids", ack_ours, ack_theirs, COUNT),
    contest("XADD of an event", event_ours, event_theirs),
    contest("XREADGROUP", group_ours, group_theirs),
    contest(
        "encode an envelope",
        lambda: encode_envelope(IDS[0], PAYLOAD, NOW_MS, 0),
        lambda: msgpack.packb([IDS[0], PAYLOAD, NOW_MS, 0]),
    ),
    contest(
        "encode an override",
        lambda: encode_retry(7, BACKOFF),
        lambda: msgpack.packb([7, BACKOFF]),
    ),
    contest("decode an envelope with an override", decode_ours, decode_theirs),
    contest(
        "encode a delayed member",
        lambda: encode_delayed_member("welcome", ENVELOPE),
        lambda: len(b"welcome").to_bytes(4, "little") + b"welcome" + ENVELOPE,
    ),
    contest("decode a delayed member", lambda: decode_delayed_member(MEMBER), member_theirs),
    Contest(
        "check that bytes are one msgpack value",
        lambda: check_msgpack(ENVELOPE),
        lambda: msgpack.unpackb(ENVELOPE),
        lambda: True,
        lambda: bool(msgpack.unpackb(ENVELOPE)),
    ),
    Contest(
        "draw an id",
        lambda: ULIDS.next(NOW_MS),
        lambda: str(ulid.ULID()),
        lambda: is_ulid(ULIDS.next(NOW_MS)),
        lambda: is_ulid(str(ulid.ULID())),
    ),
    contest(
        "backoff",
        lambda: backoff_ms(9, 100, multiplier=2.0, max_delay_ms=30_000, jitter_ms=100, luck=0.5),
        backoff_theirs,
    ),
]
