"""The heartbeat: a thread that renews the leases of the entries that a worker holds.

It has a connection of its own and needs no event loop. So no job runs twice because its handler is
slow or blocks the loop. A handler in C that keeps the GIL stops this thread too: its job may run
twice. Renewal is fenced: an entry that another worker took over stays there, and is reported.
"""

import asyncio
import logging
import threading
import time
from typing import Final

from chasqui.consuming.held import Held
from chasqui.consuming.throttled_log import ThrottledLog
from chasqui.errors import ChasquiError, OutcomeUnknownError, UnreachableError
from chasqui.model import clock
from chasqui.scripts.settling import Consumer, renew
from chasqui.transport.blocking import BlockingConnection

logger = logging.getLogger(__name__)

#: The most leases that one command renews.
RENEWED: Final = 500


class Heartbeat:
    """Renews what a consumer holds, every third of a lease."""

    def __init__(
        self,
        connection: BlockingConnection,
        consumer: Consumer,
        held: Held,
    ) -> None:
        self._connection = connection
        self._consumer = consumer
        self._queue = queue = consumer.keys.queue
        self._held = held
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False
        self._log = ThrottledLog(logger, queue)
        self._standstills = ThrottledLog(logger, queue)
        self._thread = threading.Thread(
            target=self.run, name=f"chasqui-heartbeat-{queue}", daemon=True
        )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to beat, for a worker that runs in this loop."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End the thread, whatever it waits for, and wait until it has ended."""
        self._is_stopped = True
        self._held.must_renew.set()
        self._connection.close()
        if self._thread.is_alive():
            self._thread.join()

    def run(self) -> None:
        """Beat until stopped. A beat that failed is repeated sooner than a third of a lease."""
        period_s = self._held.lease_s / 3
        wait_s = period_s
        while True:
            since_ns, due_s = clock.boot_ns(), time.monotonic() + wait_s
            self._held.must_renew.wait(wait_s)
            self._held.must_renew.clear()
            if self._is_stopped:
                return
            self._warn_if_late(time.monotonic() - due_s, since_ns)
            try:
                self.run_once()
                wait_s = period_s
            except Exception as error:
                self._log_failure(error)
                wait_s = min(1.0, period_s / 4)

    def run_once(self) -> int:
        """Renew everything that we hold; how many entries that was."""
        started_s = clock.boot_s()
        ids = self._held.ids()
        lost: list[bytes] = []
        for start in range(0, len(ids), RENEWED):
            part = ids[start : start + RENEWED]
            request = renew(self._consumer, part, timeout_s=self._held.lease_s / 3)
            lost += self._connection.call(request)
        if lost:  # before anything counts as ours again
            self._take_away(lost)
        self._held.renewed(started_s)
        return len(ids)

    def _take_away(self, entry_ids: list[bytes]) -> None:
        """Report entries that are not ours; some may be done by now."""
        lost = self._held.take_away(entry_ids)
        if lost and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._held.report_lost, lost)

    def _warn_if_late(self, late_s: float, since_ns: int) -> None:
        """Warn if this thread could not run before the leases were over, though the machine was
        awake: the monotonic clock stands still while it sleeps."""
        if late_s < self._held.lease_s / 3 or self._held.is_alive:
            return
        # This thread may get the GIL only after the run that kept it has ended.
        if names := self._held.running_names(since_ns):
            self._standstills.warning(
                "leases of queue %s lapsed while this ran: %s. No other thread could run for "
                "%.1f s: a handler kept the GIL, or the process was stopped. Another worker may "
                "run the jobs as well. A handler that keeps the GIL needs `processes` or a longer "
                "lease.",
                self._queue,
                ", ".join(repr(name) for name in names),
                late_s,
                job_names=names,
            )

    def _log_failure(self, error: Exception) -> None:
        if self._is_stopped:
            return  # we closed the connection
        queue = self._queue
        if isinstance(error, UnreachableError | OutcomeUnknownError):  # the connection logs it
            logger.debug("leases not renewed: %s", error, extra={"queue": queue})
            return
        trace = None if isinstance(error, ChasquiError) else error
        self._log.warning(
            "queue %s: the leases of running jobs are not renewed: %s", queue, error, error=trace
        )
