"""The heartbeat: a thread of its own that keeps entries ours while handlers work.

It has its own connection and needs no event loop, so neither a long handler nor one that blocks the
loop lets a job be run twice; one in C that keeps the GIL may, for this thread has to wait as well.
Renewal is fenced: an entry that somebody took over stays with him, and is reported.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from chasqui import clock, scripts
from chasqui.blocking import BlockingConnection
from chasqui.consuming.throttled_log import Complaints
from chasqui.consumer.holdings import Holdings
from chasqui.errors import ChasquiError, OutcomeUnknownError, UnreachableError
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect

logger = logging.getLogger(__name__)

RENEW_BATCH: Final = 500


class Heartbeat:
    """Renews what a consumer holds, at a third of the lease."""

    def __init__(
        self,
        connection: BlockingConnection,
        keys: Keys,
        group: str,
        consumer_id: str,
        holdings: Holdings,
        on_lost: Callable[[list[bytes]], None],
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._group = group
        self._consumer_id = consumer_id
        self._holdings = holdings
        self._on_lost = on_lost
        self._is_stopped = False
        self._wake = threading.Event()
        self._complaints = Complaints(logger, keys.queue)
        self._standstills = Complaints(logger, keys.queue)
        self._thread = threading.Thread(
            target=self.run, name=f"chasqui-heartbeat-{keys.queue}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, whatever it waits for. Blocks until it has ended."""
        self._is_stopped = True
        self._wake.set()
        self._connection.close()
        if self._thread.is_alive():
            self._thread.join()

    def beat_now(self) -> None:
        """Somebody waits for the leases to be known again."""
        self._wake.set()

    def run(self) -> None:
        """Beat until stopped. A beat that failed is repeated soon, not a third of a lease later."""
        period_s = self._holdings.lease_s / 3
        wait_s = period_s
        while True:
            since_ns, due_s = clock.boot_ns(), time.monotonic() + wait_s
            self._wake.wait(wait_s)
            self._wake.clear()
            if self._is_stopped:
                return
            self._look_back(time.monotonic() - due_s, since_ns)
            try:
                self.run_once()
                wait_s = period_s
            except Exception as error:
                self._complain(error)
                wait_s = min(1.0, period_s / 4)

    def run_once(self) -> int:
        """Renew everything in hand; how many entries that was."""
        started_s = clock.boot_s()
        ids = self._holdings.ids()
        lost: list[bytes] = []
        for start in range(0, len(ids), RENEW_BATCH):
            lost += self._connection.call(
                scripts.call(
                    scripts.RENEW,
                    [self._keys.stream],
                    [self._group, self._consumer_id, *ids[start : start + RENEW_BATCH]],
                    Effect.IDEMPOTENT,
                    timeout_s=self._holdings.lease_s / 3,
                )
            )
        if lost:  # before anything counts as ours again
            self._on_lost(lost)
        self._holdings.renewed(started_s)
        return len(ids)

    def _look_back(self, late_s: float, since_ns: int) -> None:
        """Tell if we could not run before the leases were over, though the machine was awake: this
        clock stands still while it sleeps."""
        if late_s < self._holdings.lease_s / 3 or self._holdings.is_alive:
            return
        # A thread that waits for the GIL may get it after a run that kept it has ended.
        if names := self._holdings.running_names(since_ns):
            self._standstills.warn(
                "leases of queue %s lapsed while this ran: %s. No other thread could run for "
                "%.1f s: a handler kept the GIL, or the process was stopped. Another worker may "
                "run the jobs as well. A handler that keeps the GIL needs `processes` or a longer "
                "lease.",
                self._keys.queue,
                ", ".join(repr(name) for name in names),
                late_s,
                job_names=names,
            )

    def _complain(self, error: Exception) -> None:
        if self._is_stopped:
            return  # that was us
        queue = self._keys.queue
        if isinstance(error, UnreachableError | OutcomeUnknownError):  # the connection tells
            logger.debug("leases not renewed: %s", error, extra={"queue": queue})
            return
        trace = None if isinstance(error, ChasquiError) else error
        self._complaints.warn(
            "queue %s: the leases of running jobs are not renewed: %s", queue, error, error=trace
        )
