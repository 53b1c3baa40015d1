"""How a job ended, for the thread that waits for it: no loop, no other thread.

It reads events on from now and, meanwhile, back to when the job was added or, where that is not
known, to the first event there is: the newest pages at once, the others with pauses between. An id
does tell when it was drawn, but not by whose clock.
"""

import logging
import time

from chasqui.blocking import BlockingConnection
from chasqui.events.job_end_watcher import READ_COUNT, End, Past, added_ms, end_in
from chasqui.errors import AuthenticationError, ChasquiError
from chasqui.events.log import BLOCK_MS, EventLog, QueueEvent, id_of, parse_event
from chasqui.model.keys import Keys

logger = logging.getLogger(__name__)


class Follower:
    """The end of one job, followed by the thread that waits for it."""

    def __init__(
        self, connection: BlockingConnection, keys: Keys, job_id: str, since_ms: int | None
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._job_id = job_id
        self._since_ms = since_ms
        self._log = EventLog(keys, "$", block_ms=BLOCK_MS, count=READ_COUNT)
        self._past: Past | None = None
        #: What ended before this, by the server's clock, is another job's that had the id.
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
            self._from_ms = run(added_ms(self._keys, self._job_id, self._since_ms))
            before = id_of(run(self._log.pin()))
            self._past = Past(self._keys, before, self._from_ms)
        while self.end is None and self._past is not None and self._past.wait_s == 0.0:
            self._read_back(self._past)
        if self.end is None:
            if self._past is not None:
                limit_s = min(limit_s, self._past.wait_s)
            block_ms = max(1, min(BLOCK_MS, int(limit_s * 1000)))
            for event in run(self._log.read(block_ms)):
                self.end = self._end_in(event) or self.end

    def _read_back(self, past: Past) -> None:
        """Look for the job's last end in one more page of the past."""
        job_id = self._job_id.encode()
        for entry in self._connection.run(past.read()):
            # Most are about others: they are not parsed.
            if job_id in entry[1] and (end := self._end_in(parse_event(*entry))) is not None:
                self.end = end
                break
        if self.end is not None or past.before is None:
            self._past = None  # what is before that matters no more

    def _end_in(self, event: QueueEvent) -> End | None:
        end = end_in(event) if event.job_id == self._job_id else None
        return end if end is not None and end.at_ms >= self._from_ms else None
