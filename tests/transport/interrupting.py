"""A process whose calls are interrupted at any moment, by a signal handler that raises, while its
other threads call too: `python -m tests.transport.interrupting URL EXCEPTION COUNT SEED`."""

import builtins
import random
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from chasqui.model.config import Endpoint
from chasqui.transport.blocking import BlockingConnection
from tests.fixtures import echo


class Interrupter:
    """Raises in the main thread, by a timer."""

    def __init__(self, raised: type[BaseException], rng: random.Random) -> None:
        self.count = 0
        self._raised = raised
        self._rng = rng
        self._is_armed = False
        signal.signal(signal.SIGALRM, self._handle)

    def interrupt(self, deed: Callable[[], None]) -> None:
        """Do something, and perhaps not all of it. Half of those that are interrupted are so again
        and again, while they clean up too."""
        rng = self._rng
        again_s = rng.choice([0.0, rng.uniform(1e-5, 1e-4)])
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3), again_s)
        try:
            self._is_armed = True
            deed()
        except self._raised:
            pass
        finally:
            self._is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle(self, *_: object) -> None:
        if self._is_armed:
            self.count += 1
            raise self._raised


def main(url: str, raised: str, wanted: int, seed: int) -> None:
    connection = BlockingConnection(Endpoint.parse(url), key=b"k")
    interrupter = Interrupter(getattr(builtins, raised), random.Random(seed))
    is_over = threading.Event()

    def work(name: str) -> int:
        number = 0
        while not is_over.is_set():
            number += 1
            assert connection.call(echo(f"{name}-{number}")) == f"{name}-{number}".encode()
        return number

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(work, name) for name in ("a", "b")]
        calls = 0

        def call() -> None:
            assert connection.call(echo(calls)) == b"%d" % calls

        try:
            while interrupter.count < wanted and not any(other.done() for other in others):
                calls += 1
                interrupter.interrupt(call)
        finally:
            is_over.set()
        theirs = [other.result() for other in others]
    assert connection.call(echo("x")) == b"x"
    assert min(theirs) > 0
    print(f"{interrupter.count} interrupts in {calls} calls, {sum(theirs)} calls of others")
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
