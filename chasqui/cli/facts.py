"""What a queue holds at one moment, and how that changes: for `inspect`, `watch` and `top`."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from chasqui._core.reply import ReplyError
from chasqui.managing import state
from chasqui.managing.state import Counts
from chasqui.model.keys import Keys
from chasqui.timed.repeatables import scored
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, commands
from chasqui.transport.server import mapping, mappings, time_us, uptime_s

#: Looks that are remembered: one minute's, at one per second.
HISTORY: Final = 60
#: A worker that was silent for this long is likely gone: a live one asks for jobs every few seconds
#: and renews its leases.
SILENT_MS: Final = 60_000
_BARS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A consumer of the group."""

    name: str
    pending: int
    #: Since it last asked for jobs or renewed a lease.
    idle_ms: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What a queue holds."""

    #: When it was looked at, by the monotonic clock.
    at_s: float
    counts: Counts
    #: How overdue the first delayed job is; None if there is none.
    delayed_lag_ms: int | None
    has_group: bool
    #: Entries that were ever added to the stream; None if the server does not count them.
    entered: int | None
    #: Finished jobs in the history, if workers write one.
    history: int
    #: All consumers of the group, dead ones included.
    consumers: list[WorkerFacts]
    #: Whether their silence says which are live. While the queue is paused, none asks for jobs; and
    #: a server that replays its append-only file at its start counts that as seeing them all.
    tells_live: bool

    @property
    def live(self) -> list[WorkerFacts]:
        """The workers seen in the last minute; all of them if that is unknown."""
        return [one for one in self.consumers if not self.tells_live or one.idle_ms < SILENT_MS]

    @property
    def depth(self) -> int:
        return self.counts.waiting + self.counts.pending

    @property
    def left(self) -> int | None:
        """Entries that ever left the stream: completed, dead, or delayed for a retry."""
        return None if self.entered is None else self.entered - self.depth

    def rows(self) -> dict[str, Any]:
        """The facts by name. The first six have chasquimq's names."""
        counts, live = self.counts, len(self.live)
        return {
            "stream depth": self.depth,
            "pending": counts.pending,
            "DLQ depth": counts.dlq,
            "delayed depth": counts.delayed,
            "oldest delayed lag (ms)": self.delayed_lag_ms,
            "repeatable count": counts.repeatables,
            "oldest job in stream (ms)": counts.oldest_ms,
            "paused": counts.is_paused,
            "live workers": live if self.tells_live else None,
            "silent workers": len(self.consumers) - live if self.tells_live else None,
            "history": self.history,
        }


async def look(connection: Connection, keys: Keys, group: str) -> Facts:
    """The facts at this moment."""
    counts = await connection.run(state.counts(keys, group))
    request = commands(
        ("XINFO", "GROUPS", keys.stream),
        ("XINFO", "STREAM", keys.stream),
        ("ZRANGE", keys.delayed, 0, 0, "WITHSCORES"),
        ("TIME",),
        ("XINFO", "CONSUMERS", keys.stream, group),
        ("INFO", "server"),
        ("XLEN", keys.history),
        effect=Effect.READ,
        raises=False,
    )
    groups, stream, oldest, time_, consumers, info, history = await connection.submit(request)
    now_ms = time_us(time_) // 1000
    names = [one.get(b"name") for one in mappings(groups)]
    return Facts(
        at_s=time.monotonic(),
        counts=counts,
        delayed_lag_ms=next((max(0, now_ms - due) for _, due in scored(oldest)), None),
        has_group=group.encode() in names,
        entered=0 if isinstance(stream, ReplyError) else mapping(stream).get(b"entries-added"),
        history=history if isinstance(history, int) else 0,
        consumers=[
            WorkerFacts(one[b"name"].decode(errors="replace"), one[b"pending"], one[b"idle"])
            for one in mappings(consumers)
        ],
        tells_live=not counts.is_paused
        and (not mappings(consumers) or uptime_s(info) * 1000 >= SILENT_MS),
    )


class History:
    """The last looks at a queue: changes, rates, sparklines."""

    def __init__(self) -> None:
        self._looks: deque[Facts] = deque(maxlen=HISTORY)

    def add(self, facts: Facts) -> None:
        self._looks.append(facts)

    @property
    def last(self) -> Facts:
        return self._looks[-1]

    def series(self, row: str) -> list[float]:
        """The numbers of a row, oldest first."""
        return [float(value or 0) for facts in self._looks for value in (facts.rows()[row],)]

    def change(self, row: str) -> float | None:
        """How much a row has grown since the look before; None if this is the first."""
        series = self.series(row)
        return series[-1] - series[-2] if len(series) > 1 else None

    def rates(self, which: str) -> list[float]:
        """Entries per second that have `entered` or `left` the stream, for each pair of looks."""
        found = []
        for before, after in zip(self._looks, list(self._looks)[1:], strict=False):
            old, new = getattr(before, which), getattr(after, which)
            if old is not None and new is not None:
                found.append(max(0.0, (new - old) / (after.at_s - before.at_s)))
        return found


def sparkline(values: Iterable[float], width: int) -> str:
    """The last `width` values as a line of bars; the highest value has a full one."""
    last = list(values)[-width:]
    most = max(last, default=0)
    if most <= 0:
        return _BARS[0] * len(last)
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in last)
