"""Reads that leave room for live workers: a page is short, and a rest follows it.

While the server reads a page it serves no other client. So a live worker waits for at most one page
of each task that is reading, and how often it waits depends on the share of time that they take.
"""

import time
from typing import Final

from chasqui.spark.options import Options

#: The default entries of a page: gentle (a tenth of a millisecond of the server's time), and at
#: full speed.
PAGE: Final = 250
FULL_PAGE: Final = 1000
#: The most bytes of a page, if entries are large.
PAGE_BYTES: Final = 64 * 1024
#: The entries of the first page: their size is not known yet.
FIRST_PAGE: Final = 10
#: The most that the next rest is shortened by, because a sleep lasts a bit longer than asked.
_SLACK_S: Final = 0.001
#: The longest rest: a page that took much longer was waiting for something else.
_MOST_S: Final = 1.0


class ReadPacing:
    """How many entries a task asks for at once, and how long it rests after them."""

    def __init__(self, options: Options, *, is_alone: bool = False) -> None:
        self.most = options.fetch_count or (FULL_PAGE if options.server_share == 1 else PAGE)
        # A single reader delays others by one page at most, whether it rests or not.
        self._share = 1.0 if is_alone else options.server_share
        self._rows_per_s = options.max_read_rows_per_second
        self._next = min(FIRST_PAGE, self.most)
        self._asked_s = self._used_s = 0.0
        self._overslept_s = 0.0

    def ask(self, most: int | None = None) -> int:
        """How many entries to ask for now."""
        self._asked_s, self._used_s = time.monotonic(), time.thread_time()
        return self._next if most is None else min(self._next, most)

    def rest(self, rows: int, size: int) -> None:
        """Sleep after a page of so many rows and bytes."""
        now_s = time.monotonic()
        if rows:
            self._next = max(1, min(self.most, PAGE_BYTES * rows // max(size, 1)))
        took_s = now_s - self._asked_s
        # While this thread itself was busy, the server was free.
        waited_s = max(0.0, took_s - (time.thread_time() - self._used_s))
        rest_s = min(waited_s / self._share - took_s, _MOST_S)
        if self._rows_per_s:
            rest_s = max(rest_s, rows / self._rows_per_s - took_s)
        rest_s -= self._overslept_s
        if rest_s > 0:
            time.sleep(rest_s)
            self._overslept_s = min(_SLACK_S, max(0.0, time.monotonic() - now_s - rest_s))
        else:
            self._overslept_s = min(_SLACK_S, -rest_s)
