"""Holds the name of a consuming query and its jobs while its driver lives, and promotes what comes
back to its queues."""

import contextlib
import logging
import re
import threading
import time
import uuid
from typing import Final

from chasqui import scripts
from chasqui.blocking import BlockingConnection
from chasqui.managing.consumers import join
from chasqui.errors import ChasquiError, ServerError
from chasqui.events.writer import ACTIVE, COMPLETED
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect, Plan, commands
from chasqui.managing.retention import Log, Trimmer
from chasqui.transport.server import mappings
from chasqui.spark import corrupt, ranges
from chasqui.spark.connections import open_connection
from chasqui.spark.options import Options
from chasqui.spark.reading.pacing import Pace
from chasqui.spark.consuming.promoting import Promoting
from chasqui.spark.reading.ranges import Mark, Place

logger = logging.getLogger(__name__)

BATCH: Final = scripts.load("spark_batch", "envelope")
RENEW: Final = scripts.load("spark_renew")

#: Jobs in one script call: about a millisecond of the server's time.
SLICE: Final = 250
#: The longest time between two renewals: workers take over what is idle for 30 s.
RENEW_S: Final = 10.0


class ConsumerTakenError(ChasquiError):
    """Another query of the same name is at work."""


class Keeper:
    """The lease on a name, and what is done to batches under it."""

    def __init__(self, options: Options) -> None:
        assert options.consumer is not None
        self._options = options
        self._name = options.consumer
        self._holder = str(uuid.uuid4())
        self._connections: dict[str, BlockingConnection] = {}
        self._trimmers = {queue: Trimmer(Log.events(Keys(queue))) for queue in options.queue}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._promoting: Promoting | None = None
        self._lost: str | None = None
        #: When batches were claimed, by this driver.
        self._claimed_s: dict[int, float] = {}
        #: The batch whose jobs are renewed.
        self._renewed = 0

    # ── Its life ────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Take the name in all queues; ConsumerTakenError if another query holds it for longer
        than one that died could."""
        deadline_s = time.monotonic() + self._options.consumer_lease + 2
        for queue in self._options.queue:
            self._connections[queue] = open_connection(self._options, queue)
            self._connections[queue].run(join(Keys(queue), self._options.group))
            while (free_in_ms := self._lease(queue)) >= 0:
                if time.monotonic() > deadline_s:
                    self.close()
                    raise ConsumerTakenError(
                        f"another query consumes queue {queue!r} as {self._name!r}: stop it, or "
                        "give this one another consumer"
                    )
                self._stopping.wait(min(free_in_ms, 500) / 1000 + 0.01)
            # The lease of a successor ends with it; this stays, and stops a driver that stood
            # still in the meantime.
            driver = self._driver(Keys(queue))
            self._connections[queue].execute("SET", driver, self._holder, effect=Effect.IDEMPOTENT)
        self._thread = threading.Thread(
            target=self._renew_for_ever, name=f"chasqui-lease-{self._name}", daemon=True
        )
        self._thread.start()
        self._promoting = Promoting(self._options)

    def check(self) -> None:
        """Raise if the name was lost."""
        if self._lost is not None:
            raise ConsumerTakenError(self._lost)

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._promoting is not None:
            self._promoting.close()
            self._promoting = None
        for queue, connection in self._connections.items():
            keys = Keys(queue)
            names = [self._lock(keys), keys.spark(f"consume:{self._name}:bell")]
            try:
                connection.call(
                    scripts.call(scripts.LEASE_RELEASE, names, [self._holder], Effect.IDEMPOTENT)
                )
            except ChasquiError as error:
                fields = {"consumer_name": self._name}
                logger.debug("the lease of %s ends by itself: %s", self._name, error, extra=fields)
            connection.close()
        self._connections.clear()

    def _lock(self, keys: Keys) -> bytes:
        return keys.spark(f"consume:{self._name}")

    def _driver(self, keys: Keys) -> bytes:
        """The key that holds which driver took the name last."""
        return keys.spark(f"consume:{self._name}:driver")

    def _lease(self, queue: str) -> int:
        """-1 if the name is ours, else the milliseconds until it may be free."""
        answer: int = self._connections[queue].call(
            scripts.call(
                scripts.LEASE_TAKE,
                [self._lock(Keys(queue))],
                [self._holder, max(1, int(self._options.consumer_lease))],
                Effect.IDEMPOTENT,
            )
        )
        return answer

    def _renew_for_ever(self) -> None:
        while not self._stopping.wait(min(self._options.consumer_lease / 3, RENEW_S)):
            try:
                for queue in self._options.queue:
                    if self._lease(queue) >= 0:
                        self._lose(queue)
                        return
                    self._connections[queue].run(self._renew(queue, self._renewed))
            except ChasquiError as error:
                fields = {"consumer_name": self._name}
                logger.warning(
                    "the jobs of %s were not renewed: %s", self._name, error, extra=fields
                )

    def _lose(self, queue: str) -> None:
        self._lost = f"queue {queue!r} is consumed as {self._name!r} by another query now"

    def _renew(self, queue: str, seq: int) -> Plan[None]:
        after = b"0"
        while after:
            after = yield scripts.call(
                RENEW,
                [Keys(queue).stream],
                [self._options.group, self.consumer(seq), after, SLICE],
                Effect.IDEMPOTENT,
            )

    # ── Batches ─────────────────────────────────────────────────────────────────────────────────

    def consumer(self, seq: int) -> str:
        return f"spark:{self._name}:{seq}"

    def batches(self, queue: str) -> list[int]:
        """The batches that there are consumers for, the oldest first."""
        form = re.compile(rf"spark:{re.escape(self._name)}:(\d+)")
        reply = self._connections[queue].execute(
            "XINFO", "CONSUMERS", Keys(queue).stream, self._options.group, effect=Effect.READ
        )
        found = []
        for one in mappings(reply):
            if match := form.fullmatch(one[b"name"].decode(errors="replace")):
                found.append(int(match[1]))
        return sorted(found)

    def renew(self, seq: int) -> None:
        """Renew the jobs of this batch from now on; at once if an earlier life took them, for they
        may have been idle for long."""
        if seq != self._renewed:
            self._renewed = seq
            for queue in self._options.queue:
                self._connections[queue].run(self._renew(queue, seq))

    def holds(self, queue: str, seq: int) -> bool:
        """Whether a batch has jobs already."""
        return bool(self._connections[queue].run(self._pending(queue, seq, "-", 1)))

    def claim(self, queue: str, seq: int, most: int) -> int:
        """Take new jobs for a batch; how many."""
        taken = 0
        self._renewed = seq
        self._claimed_s[seq] = time.monotonic()
        while taken < most:
            count = min(SLICE, most - taken)
            # Sent twice it takes more, and all of it is the batch.
            got = self._step(queue, seq, count, ACTIVE, "")
            taken += got
            if got < count:
                break
        return taken

    def _step(self, queue: str, seq: int, most: int, event: bytes, took_us: int | str) -> int:
        keys = Keys(queue)
        tells = self._options.write_events
        connection = self._connections[queue]
        count: int = connection.call(
            scripts.call(
                BATCH,
                [keys.stream, keys.events, keys.paused, self._driver(keys)],
                [
                    self._options.group,
                    self.consumer(seq),
                    most,
                    event,
                    int(tells),
                    took_us,
                    self._holder,
                ],
                Effect.IDEMPOTENT,
            )
        )
        if count < 0:
            self._lose(queue)
            self.check()
        if tells and (trim := self._trimmers[queue].wrote(count)) is not None:
            with contextlib.suppress(ServerError):  # best effort, as the events themselves
                connection.call(trim)
        return count

    def marks(self, queue: str, seq: int, step: int) -> list[Mark]:
        """The jobs of a batch, counted."""
        marks: list[Mark] = []
        after = "-"
        while ids := self._connections[queue].run(self._pending(queue, seq, after, step)):
            marks.append(Mark(ids[-1], len(ids)))
            after = f"({ids[-1]}"
            if len(ids) < step:
                break
        return marks

    def forget_corrupt(self, queue: str, seq: int) -> None:
        """A batch is about to be computed by this driver: what an earlier one noted is void."""
        corrupt.forget(self._connections[queue], Keys(queue), self.consumer(seq))

    def acknowledge(self, queue: str, seq: int) -> None:
        """A batch is done: bury what could not be read, then acknowledge the rest."""
        corrupt.bury_noted(
            self._connections[queue],
            Keys(queue),
            self._options.group,
            self.consumer(seq),
            tells=self._options.write_events,
        )
        started_s = self._claimed_s.get(seq)
        took_us = "" if started_s is None else int((time.monotonic() - started_s) * 1_000_000)
        while self._step(queue, seq, SLICE, COMPLETED, took_us):
            pass

    def forget(self, seq: int) -> None:
        """Batches up to this one are over."""
        for one in [one for one in self._claimed_s if one <= seq]:
            del self._claimed_s[one]

    def undelivered(self, queue: str) -> int:
        """How many jobs nobody has taken yet."""
        stream = Keys(queue).stream
        connection = self._connections[queue]
        for one in mappings(connection.execute("XINFO", "GROUPS", stream, effect=Effect.READ)):
            if one[b"name"].decode(errors="replace") == self._options.group:
                behind = Place(one[b"last-delivered-id"].decode(), None)
                passed = ranges.walk(stream, behind, Pace(self._options), counts_loss=False)
                return connection.run(passed).count
        return 0

    def _pending(self, queue: str, seq: int, start: str, count: int) -> Plan[list[str]]:
        stream = Keys(queue).stream
        rows = yield commands(
            ("XPENDING", stream, self._options.group, start, "+", count, self.consumer(seq)),
            effect=Effect.READ,
        )
        return [row[0].decode() for row in rows]
