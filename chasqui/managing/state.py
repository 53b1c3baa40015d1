"""The queue as a whole: how much it holds, whether it is paused, and its deletion."""

from dataclasses import dataclass

from chasqui.errors import NotSupportedError
from chasqui.model.config import check_flag
from chasqui.model.keys import Keys, check_text
from chasqui.scripts import managing
from chasqui.transport.request import Effect, Plan, commands


@dataclass(frozen=True, slots=True)
class Counts:
    """How much of everything a queue holds, at one moment."""

    waiting: int
    pending: int
    delayed: int
    dlq: int
    repeatables: int
    #: How long the oldest job has been in the stream, waiting or running; 0 if there is none.
    oldest_ms: int
    is_paused: bool

    def refuse_if_any(self, queue: str) -> None:
        """Raise if the queue holds jobs."""
        if self.waiting or self.pending or self.delayed or self.dlq:
            raise NotSupportedError(
                f"queue {queue!r} holds {self.waiting} waiting, {self.pending} pending, "
                f"{self.delayed} delayed and {self.dlq} dead jobs: "
                "obliterate(force=True) deletes them too"
            )


def counts(keys: Keys, group: str) -> Plan[Counts]:
    """How much the queue holds, in one round trip."""
    check_text(group, "group")
    length, pending, delayed, dead, repeats, oldest_ms, paused = yield managing.counts(keys, group)
    # An entry that was deleted by hand stays pending for ever, but is no longer in the stream.
    waiting = max(0, length - pending)
    return Counts(waiting, pending, delayed, dead, repeats, oldest_ms, bool(paused))


def pause(keys: Keys) -> Plan[None]:
    yield commands(("SET", keys.paused, "1"), effect=Effect.IDEMPOTENT)


def resume(keys: Keys) -> Plan[None]:
    yield commands(("DEL", keys.paused), effect=Effect.IDEMPOTENT)


def is_paused(keys: Keys) -> Plan[bool]:
    reply = yield commands(("EXISTS", keys.paused), effect=Effect.READ)
    return bool(reply)


def obliterate(keys: Keys, group: str, *, force: bool = True) -> Plan[int]:
    """Delete every key of the queue; how many there were. Without `force` only if it holds no
    jobs."""
    check_flag("force", force)
    if not force:
        (yield from counts(keys, group)).refuse_if_any(keys.queue)
    cursor, deleted = b"0", 0
    while True:
        scan = ("SCAN", cursor, "MATCH", keys.pattern, "COUNT", 1000)
        cursor, found = yield commands(scan, effect=Effect.READ)
        if found:
            deleted += yield commands(("UNLINK", *found), effect=Effect.IDEMPOTENT)
        if cursor == b"0":
            return deleted
