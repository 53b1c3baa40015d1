"""A promoter, a scheduler or a worker that is both, in a process of its own, whose wall clock may
be off.

python -m tests.timed.process promoter URL QUEUE HOLDER CLOCK_OFFSET_S
"""

import asyncio
import signal
import subprocess
import sys
import time


def main() -> None:
    role, url, queue, holder, offset_s = sys.argv[1:]
    if int(offset_s):
        _shift_clock(int(offset_s))
    # Only now: a module may keep a clock function that it imported.
    from chasqui.timed.promoter import Promoter
    from chasqui.timed.scheduler import Scheduler
    from chasqui.worker import Worker

    if role == "worker":
        asyncio.run(Worker(queue, _nothing, redis_url=url, consumer_id=holder).run())
        return
    engine = (Promoter if role == "promoter" else Scheduler)(url, queue, holder_id=holder)

    async def run() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, engine.shutdown)
        await engine.run()

    asyncio.run(run())


async def _nothing(job: object) -> None:
    """Jobs are left in the stream: the queue is paused."""


def _shift_clock(offset_s: int) -> None:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + offset_s
    time.time_ns = lambda: real_ns() + offset_s * 1_000_000_000


class Process:
    """One such process; ends with its `with` block, stopped or not."""

    def __init__(
        self, role: str, url: str, queue: str, holder: str, clock_offset_s: int = 0
    ) -> None:
        self.holder = holder
        arguments = [role, url, queue, holder, str(clock_offset_s)]
        self._process = subprocess.Popen([sys.executable, "-m", __spec__.name, *arguments])

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Ask it to end; its exit code."""
        self._process.terminate()
        return self._process.wait()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self.kill()


if __name__ == "__main__":
    main()
