"""How a job ended, for the thread that waits for it: no loop, no other thread.

It reads events on from now and, meanwhile, page by page back to when the job was added or, where
that is not known, to the first event there is. An id does tell when it was drawn, but not by whose
clock.
"""

import logging
import time

from chasqui.blocking import BlockingConnection
from chasqui.ends import READ_COUNT, End, ahead_ms, end_in, there
from chasqui.errors import AuthenticationError, ChasquiError
from chasqui.event_log import BLOCK_MS, EventLog, QueueEvent, id_of, parse_event
from chasqui.keys import Keys
from chasqui.request import Effect, Plan, commands

logger = logging.getLogger(__name__)


class Follower:
    """The end of one job, followed by the thread that waits for it."""

    def __init__(
        self, connection: BlockingConnection, keys: Keys, job_id: str, since_ms: int | None
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._job_id = job_id
        self._since_ms = since_ms or 0
        self._log = EventLog(keys, "$", block_ms=BLOCK_MS, count=READ_COUNT)
        #: What lies before this id is still to be read; None: nothing.
        self._before: str | None = None
        self._from_ms = 0
        self._is_refused = False
        self.end: End | None = None

    def wait(self, limit_s: float) -> None:
        """Return when the job has ended, or after `limit_s`."""
        until_s = time.monotonic() + limit_s
        try:
            while self.end is None and not self._is_refused:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return
                self._read(left_s)
        except AuthenticationError:
            self._is_refused = True
        except ChasquiError as error:
            queue = self._keys.queue
            fields = {"queue": queue}
            logger.debug("events of queue %s cannot be read: %s", queue, error, extra=fields)
        if self.end is None:
            time.sleep(max(0.0, until_s - time.monotonic()))

    def _read(self, limit_s: float) -> None:
        run = self._connection.run
        if self._log.cursor is None:
            if self._since_ms:
                self._from_ms = there(self._since_ms, run(ahead_ms()))
            self._before = id_of(run(self._log.pin()))
        if self._before is not None:
            self.end, self._before = run(self._read_back(self._before))
        if self.end is None:
            block_ms = 1 if self._before is not None else max(1, min(BLOCK_MS, int(limit_s * 1000)))
            for event in run(self._log.read(block_ms)):
                self.end = self._end_in(event) or self.end

    def _read_back(self, before: str) -> Plan[tuple[End | None, str | None]]:
        """The job's last end in the page before an id, and the id to go on from (None: what is
        before that matters no more)."""
        entries = yield commands(
            ("XREVRANGE", self._keys.events, before, self._from_ms, "COUNT", READ_COUNT),
            effect=Effect.READ,
        )
        job_id = self._job_id.encode()
        for entry in entries:
            # Most are about others: they are not parsed.
            if job_id in entry[1] and (end := self._end_in(parse_event(*entry))) is not None:
                return end, None
        return None, f"({entries[-1][0].decode()}" if len(entries) == READ_COUNT else None

    def _end_in(self, event: QueueEvent) -> End | None:
        end = end_in(event) if event.job_id == self._job_id else None
        return end if end is not None and end.at_ms >= self._from_ms else None
