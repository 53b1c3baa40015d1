"""Waiting for the ends of jobs in threads: each waiting thread reads the events itself.

No event loop, no other thread. A thread that waits has a connection of its own meanwhile.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from chasqui.errors import AuthenticationError, ChasquiError
from chasqui.events.job_end import End, Past, added_ms, end_in, events_from_now
from chasqui.events.log import BLOCK_MS, CLIENT_NAME, QueueEvent, id_of, parse_event
from chasqui.model.config import AnyCredentialProvider
from chasqui.model.keys import Keys
from chasqui.transport.blocking import BlockingConnection

logger = logging.getLogger(__name__)

#: How many connections to keep for the next threads that wait.
SPARE_MAX: Final = 16


class BlockingJobEndWatcher:
    """Gives each waiting thread a connection and a waiter."""

    def __init__(
        self,
        keys: Keys,
        connection: BlockingConnection,
        credential_provider: AnyCredentialProvider | None,
    ) -> None:
        self._keys = keys
        self._endpoint = connection.endpoint
        self._credential_provider = credential_provider
        #: Connections that no thread uses right now.
        self._spare: list[BlockingConnection] = []
        self._is_closed = False

    @contextmanager
    def watch(self, job_id: str, since_ms: int | None) -> Iterator["BlockingJobEndWaiter"]:
        """A waiter for the end of a job that was added at `since_ms`, or whenever that was."""
        try:
            connection = self._spare.pop()
        except IndexError:
            connection = BlockingConnection(
                self._endpoint,
                key=self._keys.events,
                client_name=CLIENT_NAME,
                credential_provider=self._credential_provider,
            )
        try:
            yield BlockingJobEndWaiter(connection, self._keys, job_id, since_ms)
        finally:
            self._spare.append(connection)
            self._close_spare(0 if self._is_closed else SPARE_MAX)

    def close(self) -> None:
        """Close the connections; those in use follow when their threads have waited."""
        self._is_closed = True
        self._close_spare(0)

    def _close_spare(self, left: int) -> None:
        """Keep at most so many. Other threads may take and close some at the same time."""
        while len(self._spare) > left:
            with suppress(IndexError):
                self._spare.pop().close()


class BlockingJobEndWaiter:
    """Waits for the end of one job, in the thread that calls it."""

    def __init__(
        self, connection: BlockingConnection, keys: Keys, job_id: str, since_ms: int | None
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._job_id = job_id
        self._since_ms = since_ms
        self._log = events_from_now(keys)
        self._past: Past | None = None
        #: An earlier end, by the server's clock, belongs to another job with the same id.
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

    def forget(self, end: End) -> None:
        """Wait for another end: the job was replayed after this one."""
        if self.end is end:
            self.end = None

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
            # Most entries are about other jobs: they are not parsed.
            if job_id in entry[1] and (end := self._end_in(parse_event(*entry))) is not None:
                self.end = end
                break
        if self.end is not None or past.before is None:
            self._past = None  # earlier events do not matter any more

    def _end_in(self, event: QueueEvent) -> End | None:
        end = end_in(event) if event.job_id == self._job_id else None
        return end if end is not None and end.at_ms >= self._from_ms else None
