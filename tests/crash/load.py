"""A producer that goes on adding while things break, and keeps its own books."""

import os
import random
import threading
import time
from types import TracebackType
from typing import Any, Self

from chasqui import sync
from chasqui.errors import ChasquiError

#: Jobs of one add, and the pause after it.
CHUNK = 10
PAUSE_S = 0.02
#: Repeats what is random in a test: the seed that it printed.
SEED = "CHASQUI_TEST_SEED"


class Load:
    """Adds jobs in a thread until its `with` block ends."""

    def __init__(
        self, url: str, queue_name: str, name: str = "work", *, first: int = 0, **options: Any
    ) -> None:
        self.added: list[int] = []
        #: Adds that failed: they may have happened all the same.
        self.unknown: list[int] = []
        self._queue = sync.Queue(queue_name, redis_url=url, **options)
        self._name = name
        self._next = first
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._queue.close()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_S):
            numbers = list(range(self._next, self._next + CHUNK))
            self._next += CHUNK
            try:
                self._queue.add_bulk([{"name": self._name, "data": {"n": n}} for n in numbers])
                self.added += numbers
            except ChasquiError:
                self.unknown += numbers


class Seed:
    """Randomness that a failed test shows how to repeat."""

    def __init__(self) -> None:
        self.seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(1 << 32))
        self.random = random.Random(self.seed)
        print(f"repeat with {SEED}={self.seed}")

    def sleep(self, low_s: float, high_s: float) -> None:
        """Let a random while pass before the next fault."""
        time.sleep(self.random.uniform(low_s, high_s))
