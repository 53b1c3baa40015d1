"""Spark's micro-batch loop, as far as a source can see it, with its two logs, in a few lines.

Run as a program it forks an engine for every line it reads: server, queue, folder, and the step at
which that one kills itself. It tells the steps that were taken, or that the engine was killed.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadMaxRows

from chasqui.transport.blocking import BlockingConnection
from tests.spark.direct import consume_reader, rows_between

BATCH = 40


class Engine:
    """One query over a folder: `offsets/` is written before a batch, `commits/` behind it.

    The sink keeps each batch in a file of its number: taken twice, it is there once.
    """

    def __init__(self, folder: Path, step: Callable[[], None]) -> None:
        self._folder = folder
        self._step = step
        for name in ("offsets", "commits", "sink"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def run(self, reader: Any) -> None:
        """Take batches until there are none."""
        start = self._last("commits")
        if start is None:
            start = reader.initialOffset()
        logged = self._last("offsets")
        if logged is not None and logged != start:  # a batch that was begun: the same once more
            self._batch(reader, start, logged)
            start = logged
        while (end := reader.latestOffset(start, ReadMaxRows(BATCH))) != start:
            self._write("offsets", end["seq"], end)
            reader.commit(start)
            self._batch(reader, start, end)
            start = end

    def _batch(self, reader: Any, start: dict[str, int], end: dict[str, int]) -> None:
        rows = rows_between(reader, start, end)
        self._write("sink", end["seq"], [row["job_id"] for row in rows])
        self._write("commits", end["seq"], end)

    def _write(self, log: str, number: int, value: Any) -> None:
        self._step()
        scratch = self._folder / "scratch"
        scratch.write_text(json.dumps(value))
        scratch.rename(self._folder / log / f"{number:06}")
        self._step()

    def _last(self, log: str) -> Any:
        found = sorted((self._folder / log).iterdir())
        return json.loads(found[-1].read_text()) if found else None


def main() -> None:
    for line in sys.stdin:
        url, queue, folder, last = line.split()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, str(run(url, queue, Path(folder), int(last))).encode())
            os._exit(0)
        os.close(writing)
        status = os.waitpid(pid, 0)[1]
        with os.fdopen(reading) as told:
            steps = told.read()
        print(steps if os.WIFEXITED(status) else "killed", flush=True)


def run(url: str, queue: str, folder: Path, last: int) -> int:
    """Run an engine that kills itself at a step; how many it took if it did not come to that.

    A step is a file written or not, a request answered.
    """
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)

    exchange = BlockingConnection._exchange

    def counted(self: BlockingConnection, requests: Any) -> Any:
        replies = exchange(self, requests)
        step()
        return replies

    BlockingConnection._exchange = counted  # type: ignore[method-assign]
    Engine(folder, step).run(consume_reader(url, queue, fetchCount=25, minPartitions=2))
    return steps


if __name__ == "__main__":
    main()
