"""The batches of a consuming query. Each has a consumer of its own; what is pending for that one is
the batch.

While the driver lives, a thread renews the query lease and the idle time of the current batch's
jobs, so that workers do not take them over. Another thread promotes delayed jobs and retries.
"""

import contextlib
import logging
import re
import threading
import time
from typing import Final

from chasqui.errors import ChasquiError, ServerError
from chasqui.events.kinds import ACTIVE, COMPLETED
from chasqui.managing.consumers import join
from chasqui.managing.retention import Log, Trimmer
from chasqui.model.keys import Keys
from chasqui.scripts import spark as scripts
from chasqui.scripts.settling import Consumer
from chasqui.spark.connections import CHUNK, open_connection
from chasqui.spark.consuming import corrupt
from chasqui.spark.consuming.promoting import Promoting
from chasqui.spark.consuming.query_lease import ConsumerTakenError, QueryLease
from chasqui.spark.options import Options
from chasqui.spark.reading import ranges
from chasqui.spark.reading.pacing import ReadPacing
from chasqui.spark.reading.ranges import Mark, Position
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Effect, Plan, commands
from chasqui.transport.server import mappings

logger = logging.getLogger(__name__)

#: The longest time between two renewals: workers take over what is idle for 30 s.
RENEW_S: Final = 10.0


class Batches:
    """What a driver does to the batches of its query, under the query lease."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lease = QueryLease(options)
        self._connections: dict[str, BlockingConnection] = {}
        self._trimmers = {queue: Trimmer(Log.events(Keys(queue))) for queue in options.queue}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._promoting: Promoting | None = None
        #: When this driver took each batch.
        self._taken_s: dict[int, float] = {}
        #: The batch whose jobs are renewed.
        self._renewed = 0

    def open(self) -> None:
        """Take the lease in all queues; ConsumerTakenError if another query holds one for longer
        than a dead query could."""
        deadline_s = time.monotonic() + self._options.consumer_lease + 2
        try:
            for queue in self._options.queue:
                connection = self._connections[queue] = open_connection(self._options, queue)
                connection.run(join(Consumer(Keys(queue), self._options.group, "")))
                self._lease.take(connection, Keys(queue), deadline_s)
        except ConsumerTakenError:
            self.close()
            raise
        self._thread = threading.Thread(
            target=self._renew_for_ever, name=f"chasqui-lease-{self._lease.name}", daemon=True
        )
        self._thread.start()
        self._promoting = Promoting(self._options)

    def check(self) -> None:
        """Raise ConsumerTakenError if the lease is lost."""
        self._lease.check()

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._promoting is not None:
            self._promoting.close()
            self._promoting = None
        for queue, connection in self._connections.items():
            self._lease.release(connection, Keys(queue))
            connection.close()
        self._connections.clear()

    # ── Renewal ─────────────────────────────────────────────────────────────────────────────────

    def renew(self, seq: int) -> None:
        """Renew the jobs of this batch from now on. An earlier driver may have taken them, and they
        may have been idle for long, so the first time is now."""
        if seq != self._renewed:
            self._renewed = seq
            for queue in self._options.queue:
                self._connections[queue].run(self._renew_jobs(queue))

    def _renew_for_ever(self) -> None:
        while not self._stopping.wait(min(self._options.consumer_lease / 3, RENEW_S)):
            try:
                for queue in self._options.queue:
                    if not self._lease.renew(self._connections[queue], Keys(queue)):
                        return
                    self._connections[queue].run(self._renew_jobs(queue))
            except ChasquiError as error:
                name = self._lease.name
                fields = {"consumer_name": name}
                logger.warning("the jobs of %s were not renewed: %s", name, error, extra=fields)

    def _renew_jobs(self, queue: str) -> Plan[None]:
        consumer, after = self.consumer(queue, self._renewed), b"0"
        while after:
            after = yield scripts.renew(consumer, after, CHUNK)

    # ── Batches ─────────────────────────────────────────────────────────────────────────────────

    def consumer(self, queue: str, seq: int) -> Consumer:
        name = f"spark:{self._lease.name}:{seq}"
        return Consumer(Keys(queue), self._options.group, name)

    def found(self, queue: str) -> list[int]:
        """The batches that have a consumer, oldest first."""
        form = re.compile(rf"spark:{re.escape(self._lease.name)}:(\d+)")
        reply = self._connections[queue].execute(
            "XINFO", "CONSUMERS", Keys(queue).stream, self._options.group, effect=Effect.READ
        )
        names = (one[b"name"].decode(errors="replace") for one in mappings(reply))
        return sorted(int(match[1]) for name in names if (match := form.fullmatch(name)))

    def has_jobs(self, queue: str, seq: int) -> bool:
        return bool(self._connections[queue].run(self._pending(queue, seq, "-", 1)))

    def take(self, queue: str, seq: int, most: int) -> int:
        """Take new jobs for a batch; how many."""
        taken = 0
        self._renewed = seq
        self._taken_s[seq] = time.monotonic()
        while taken < most:
            count = min(CHUNK, most - taken)
            got = self._step(queue, seq, count, ACTIVE)
            taken += got
            if got < count:
                break
        return taken

    def _step(
        self, queue: str, seq: int, most: int, event: bytes, took_us: int | None = None
    ) -> int:
        lease, connection = self._lease, self._connections[queue]
        writes_events = self._options.write_events
        count: int = connection.call(
            scripts.batch(
                self.consumer(queue, seq),
                lease.driver_key(Keys(queue)),
                lease.driver,
                most,
                event=event,
                writes_events=writes_events,
                took_us=took_us,
            )
        )
        if count < 0:
            lease.lose(queue)
            lease.check()
        if writes_events and (trim := self._trimmers[queue].wrote(count)) is not None:
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
        """Drop what an earlier driver noted about a batch that this one is about to compute."""
        corrupt.forget(self._connections[queue], self.consumer(queue, seq))

    def acknowledge(self, queue: str, seq: int) -> None:
        """End a batch: bury the jobs that could not be read, then acknowledge the rest."""
        consumer, events = self.consumer(queue, seq), self._options.write_events
        corrupt.bury_noted(self._connections[queue], consumer, events=events)
        taken_s = self._taken_s.get(seq)
        took_us = None if taken_s is None else int((time.monotonic() - taken_s) * 1_000_000)
        while self._step(queue, seq, CHUNK, COMPLETED, took_us):
            pass

    def forget(self, seq: int) -> None:
        """Forget when batches up to this one were taken."""
        self._taken_s = {one: taken_s for one, taken_s in self._taken_s.items() if one > seq}

    def undelivered(self, queue: str) -> int:
        """How many jobs no consumer has taken yet."""
        stream = Keys(queue).stream
        connection = self._connections[queue]
        for one in mappings(connection.execute("XINFO", "GROUPS", stream, effect=Effect.READ)):
            if one[b"name"].decode(errors="replace") == self._options.group:
                behind = Position(one[b"last-delivered-id"].decode(), None)
                passed = ranges.walk(stream, behind, ReadPacing(self._options), counts_loss=False)
                return connection.run(passed).count
        return 0

    def _pending(self, queue: str, seq: int, start: str, count: int) -> Plan[list[str]]:
        keys, group, name = self.consumer(queue, seq)
        words = ("XPENDING", keys.stream, group, start, "+", count, name)
        rows = yield commands(words, effect=Effect.READ)
        return [row[0].decode() for row in rows]
