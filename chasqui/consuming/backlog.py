"""What a queue still has to run, as one of its workers sees it."""

from dataclasses import dataclass

from chasqui.managing.state import counts
from chasqui.scripts.settling import Consumer
from chasqui.transport.request import Effect, Plan, commands
from chasqui.transport.server import time_us


@dataclass(frozen=True, slots=True)
class Backlog:
    """How much is left. Jobs that living workers have do not count."""

    #: Delayed jobs and retries: due soon, and later than that.
    due_soon: int
    due_later: int
    waiting: int
    #: Whether the server has assigned entries to this worker.
    ours: bool
    #: Whether others have entries that they do not renew, so that this worker will take them over.
    left_behind: bool
    #: Entries that any worker has.
    pending: int
    is_paused: bool


def backlog(consumer: Consumer, soon_ms: int, lease_ms: int) -> Plan[Backlog]:
    """What is left, by the server's clock. Asks in the order in which jobs move on, so that none
    is missed on its way."""
    keys = consumer.keys
    now_ms = time_us((yield commands(("TIME",), effect=Effect.READ))) // 1000
    due_soon, delayed = yield commands(
        ("ZCOUNT", keys.delayed, "-inf", now_ms + soon_ms),
        ("ZCARD", keys.delayed),
        effect=Effect.READ,
    )
    found = yield from counts(keys, consumer.group)
    pending = ("XPENDING", keys.stream, consumer.group)
    left_behind, ours = yield commands(
        # A worker renews in each third of a lease.
        (*pending, "IDLE", lease_ms // 2, "-", "+", 1),
        (*pending, "-", "+", 1, consumer.name),
        effect=Effect.READ,
    )
    later = max(0, delayed - due_soon)
    here = found.waiting, bool(ours), bool(left_behind)
    return Backlog(due_soon, later, *here, found.pending, found.is_paused)
