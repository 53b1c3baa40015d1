"""How much is kept of a stream that is a log: a number per queue, and what readers still need.

`events` is such a stream, `history` another. Number and readers are fields of the queue's hash
`config`, so that all who write the stream trim it alike: `<stream>_max_len` is how many entries are
kept, `<stream>_readers` has a line for each reader that holds trimming back. lua/trim.lua reads
them and trims. Each writer of the stream has a `Trimmer`, which says when to run it, and sends that
request behind what it wrote.

Another stream gets the same by a `Log` of its own: what its fields are called, its key, and how
many entries are kept unless the queue says otherwise. Everything here takes a `Log`.
"""

import time
from dataclasses import dataclass
from typing import Any, Final

from chasqui import scripts
from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import evalsha
from chasqui._core.reply import ReplyError
from chasqui.model.config import MAX_MS, check_int
from chasqui.model.keys import Keys, check_text, shown
from chasqui.transport.request import Effect, Plan, Request, commands
from chasqui.transport.server import exception_for, mapping

#: Events that are kept unless the queue says otherwise.
EVENTS_KEPT: Final = 100_000
#: Finished jobs that are kept, where workers write history.
HISTORY_KEPT: Final = 100_000
#: A writer trims after so many entries, or with the first one after so long: by that much,
#: and what its server takes for a node, a stream may be longer than it should be.
TRIM_ENTRIES: Final = 1000
TRIM_S: Final = 5.0
#: More than any server holds; the scripts count in floats.
MOST: Final = 10**15
#: A reader that is dead this long is forgotten.
FORGET_MS: Final = 7 * 86_400_000
MAX_READER_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Log:
    """A stream of which the newest entries are kept."""

    #: What its settings are called.
    name: str
    key: bytes
    config: bytes
    #: How many entries are kept where the queue does not say.
    default: int

    @classmethod
    def events(cls, keys: Keys) -> "Log":
        return cls("events", keys.events, keys.config, EVENTS_KEPT)

    @classmethod
    def history(cls, keys: Keys) -> "Log":
        return cls("history", keys.history, keys.config, HISTORY_KEPT)


class Trimmer:
    """Says when one who writes a log is to trim it."""

    def __init__(self, log: Log) -> None:
        buffer = CommandBuffer()
        evalsha(buffer, scripts.TRIM.sha, [log.key, log.config], [log.name, log.default])
        self._frame = bytes(buffer)
        self._written = 0
        self._due_at_s = 0.0

    def wrote(self, count: int) -> Request | None:
        """So many entries were written; the request to send behind them, if it is time."""
        self._written += count
        now_s = time.monotonic()
        if self._written < TRIM_ENTRIES and now_s < self._due_at_s:
            return None
        self._written, self._due_at_s = 0, now_s + TRIM_S
        return Request(self._frame, Effect.IDEMPOTENT, script=scripts.TRIM)


@dataclass(frozen=True, slots=True)
class LogReader:
    """One who reads a log and holds trimming back while it lives."""

    name: str
    #: The id of the last entry that it has read.
    position: str
    #: How many entries it has not read; None where the server does not count entries.
    lag: int | None
    #: How much older the last entry that it has read is than the last that was written.
    lag_ms: int
    #: Of the entries that it has not read, how many are gone; None where that cannot be known.
    lost: int | None
    #: The most entries that the stream may have for its sake.
    hold: int
    #: How long it counts as alive without another sign of life; 0 if it is dead.
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
    max_len, readers, stream, (seconds, micros) = replies
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    facts = _Facts.of(stream)
    lines = (readers or b"").decode(errors="replace").splitlines()
    return Retention(
        int(max_len) if (max_len or b"").isdigit() and int(max_len) <= MOST else log.default,
        facts.length,
        tuple(facts.reader(line.split(" ", 4), now_ms) for line in lines),
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the server says of a log."""

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
        """The reader that a line of the field tells of."""
        until_ms, hold, position, ordinal, name = words
        lag = lost = None
        # More was read than there ever was: the stream was deleted and made anew.
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
    """Keep so many entries; None: as many as where nobody says."""
    field = f"{log.name}_max_len"
    check_int(field, max_len, 1, MOST)
    if max_len is None:
        yield commands(("HDEL", log.config, field), effect=Effect.IDEMPOTENT)
    else:
        yield commands(("HSET", log.config, field, max_len), effect=Effect.IDEMPOTENT)


def reading(
    log: Log, reader: str, position: str, ordinal: int | None, *, lease_ms: int, hold: int
) -> Plan[bool]:
    """A reader is alive for so long from now on, and has read up to an entry. The first call makes
    it known; True if it was."""
    check_int("lease_ms", lease_ms, 1, MAX_MS, takes_none=False)
    check_int("hold", hold, 1, MOST, takes_none=False)
    arguments: list[Any] = [log.name, FORGET_MS, check_reader(reader), lease_ms, hold, position]
    arguments.append("-" if ordinal is None else ordinal)
    known = yield scripts.call(scripts.READER, [log.config], arguments, Effect.IDEMPOTENT)
    return bool(known)


def forget(log: Log, reader: str) -> Plan[bool]:
    """Forget a reader: nothing is held for its sake any more; False if there was none."""
    arguments: list[Any] = [log.name, FORGET_MS, check_reader(reader)]
    known = yield scripts.call(scripts.READER, [log.config], arguments, Effect.IDEMPOTENT)
    return bool(known)


def check_reader(name: object) -> str:
    """The name itself, if a reader may be called that."""
    text = check_text(name, "reader")
    if not text.strip() or not text.isprintable() or len(text.encode()) > MAX_READER_BYTES:
        raise ValueError(
            f"reader must be 1 to {MAX_READER_BYTES} bytes of printable text, got {shown(name)}"
        )
    return text
