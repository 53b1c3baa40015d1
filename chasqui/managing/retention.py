"""How many entries a log keeps: a number per queue, and what the log's readers still need.

The streams `events` and `history` are logs. Number and readers are fields of the queue's hash
`config`, so that all writers of a stream trim it alike: `<stream>_max_len` is how many entries are
kept, `<stream>_readers` has a line for each reader that holds trimming back. lua/trim.lua reads
them and trims. Each writer has a `Trimmer`, which says when to send that request.
"""

import time
from dataclasses import dataclass
from typing import Any, Final

from chasqui._core.reply import ReplyError
from chasqui.model.config import MAX_MS, check_int
from chasqui.model.keys import Keys, check_text, shown
from chasqui.scripts import managing
from chasqui.transport.request import Effect, Plan, Request, commands
from chasqui.transport.server import exception_for, mapping, time_us

#: Events that a queue keeps by default.
EVENTS_KEPT: Final = 100_000
#: Finished jobs that a queue keeps by default, if workers write history.
HISTORY_KEPT: Final = 100_000
#: A writer trims after so many entries, or with the first entry after so long. A stream may be
#: longer than it should by that much, and by one node of the server's stream.
TRIM_ENTRIES: Final = 1000
TRIM_S: Final = 5.0
#: More than any server holds; the scripts count in floats.
MOST: Final = 10**15
MAX_READER_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Log:
    """A stream that keeps its newest entries."""

    #: The prefix of its fields in `config`.
    name: str
    key: bytes
    config: bytes
    #: How many entries are kept if the queue does not say.
    default: int

    @classmethod
    def events(cls, keys: Keys) -> "Log":
        return cls("events", keys.events, keys.config, EVENTS_KEPT)

    @classmethod
    def history(cls, keys: Keys) -> "Log":
        return cls("history", keys.history, keys.config, HISTORY_KEPT)


class Trimmer:
    """Says when a log's writer is to trim it."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._written = 0
        self._due_at_s = 0.0

    def wrote(self, count: int) -> Request | None:
        """Call it with the number of entries that were written; returns the request to send behind
        them, if it is time."""
        self._written += count
        now_s = time.monotonic()
        if self._written < TRIM_ENTRIES and now_s < self._due_at_s:
            return None
        self._written, self._due_at_s = 0, now_s + TRIM_S
        log = self._log
        return managing.trim(log.key, log.config, log.name, log.default)


@dataclass(frozen=True, slots=True)
class LogReader:
    """A reader of a log, which holds trimming back while it lives."""

    name: str
    #: The id of the last entry that it has read.
    position: str
    #: How many entries it has not read; None if the server does not count entries.
    lag: int | None
    #: How much older the last entry that it has read is than the last that was written.
    lag_ms: int
    #: How many of the entries that it has not read are gone; None if that cannot be known.
    lost: int | None
    #: The most entries that the stream may hold for this reader.
    hold: int
    #: How long it counts as alive if it is not heard of again; 0 if it is dead.
    alive_ms: int

    @property
    def is_alive(self) -> bool:
        return self.alive_ms > 0

    def __str__(self) -> str:
        behind = f"{self.lag_ms / 1000:,.1f} s" if self.lag is None else f"{self.lag:,} entries"
        lost = f", {self.lost:,} of them lost" if self.lost else ""
        return f"{self.name}, {behind} behind{lost}{'' if self.is_alive else ', ended'}"


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept of a log."""

    #: How many entries are kept, about.
    max_len: int
    #: How many there are.
    length: int
    readers: tuple[LogReader, ...]


def look(log: Log) -> Plan[Retention]:
    """What is kept of a log, and who reads it."""
    replies = yield commands(
        ("HGET", log.config, f"{log.name}_max_len"),
        ("HGET", log.config, f"{log.name}_readers"),
        ("XINFO", "STREAM", log.key),
        ("TIME",),
        effect=Effect.READ,
        raises=False,
    )
    for reply in replies:
        if isinstance(reply, ReplyError) and reply.code != "ERR":
            raise exception_for(reply)
    max_len, readers, stream, time_ = replies
    now_ms = time_us(time_) // 1000
    facts = _Facts.of(stream)
    lines = (readers or b"").decode(errors="replace").splitlines()
    return Retention(
        int(max_len) if (max_len or b"").isdigit() and int(max_len) <= MOST else log.default,
        facts.length,
        tuple(facts.reader(line.split(" ", 4), now_ms) for line in lines),
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the server says about a log."""

    length: int
    #: Entries ever added; None if it does not count them.
    added: int | None
    last_id: bytes

    @classmethod
    def of(cls, reply: Any) -> "_Facts":
        if isinstance(reply, ReplyError):  # there is no such stream yet
            return cls(0, 0, b"0-0")
        pairs = mapping(reply)
        return cls(pairs[b"length"], pairs.get(b"entries-added"), pairs[b"last-generated-id"])

    def reader(self, words: list[str], now_ms: int) -> LogReader:
        """The reader that one line of the field describes."""
        until_ms, hold, position, ordinal, name = words
        lag = lost = None
        # Otherwise the reader is ahead of the stream: this is another one of the same name.
        if self.added is not None and ordinal.isdigit() and int(ordinal) <= self.added:
            lag = self.added - int(ordinal)
            lost = max(0, lag - self.length)
        behind_ms = _ms(self.last_id.decode()) - _ms(position)
        return LogReader(
            name, position, lag, max(0, behind_ms), lost, int(hold), max(0, int(until_ms) - now_ms)
        )


def _ms(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])


def set_max_len(log: Log, max_len: int | None) -> Plan[None]:
    """Keep about so many entries; None for the default."""
    field = f"{log.name}_max_len"
    check_int(field, max_len, 1, MOST)
    if max_len is None:
        yield commands(("HDEL", log.config, field), effect=Effect.IDEMPOTENT)
    else:
        yield commands(("HSET", log.config, field, max_len), effect=Effect.IDEMPOTENT)


def reading(
    log: Log, reader: str, position: str, ordinal: int | None, *, lease_ms: int, hold: int
) -> Plan[bool]:
    """Say that a reader is alive for `lease_ms` and has read up to `position`. The first call makes
    it known; True if it was."""
    check_int("lease_ms", lease_ms, 1, MAX_MS, takes_none=False)
    check_int("hold", hold, 1, MOST, takes_none=False)
    known = yield managing.keep_for_reader(
        log.config,
        log.name,
        check_reader(reader),
        position=position,
        ordinal=ordinal,
        lease_ms=lease_ms,
        hold=hold,
    )
    return bool(known)


def forget(log: Log, reader: str) -> Plan[bool]:
    """Forget a reader, and hold nothing for it any more; False if there was none."""
    known = yield managing.forget_reader(log.config, log.name, check_reader(reader))
    return bool(known)


def check_reader(name: object) -> str:
    """The name itself, if a reader may be called that."""
    text = check_text(name, "reader")
    if not text.strip() or not text.isprintable() or len(text.encode()) > MAX_READER_BYTES:
        raise ValueError(
            f"reader must be 1 to {MAX_READER_BYTES} bytes of printable text, got {shown(name)}"
        )
    return text
