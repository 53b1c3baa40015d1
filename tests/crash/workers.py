"""The workers that the tests harm: `python -m chasqui worker tests.crash.workers:make`.

What they are told comes in the environment; what they do goes into the ledger.
"""

import asyncio
import contextlib
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from chasqui import Job, UnrecoverableError, Worker, WorkerGroup
from chasqui.consuming.acker import Acker, Acks
from chasqui.consuming.dispatcher import Dispatcher
from chasqui.consuming.heartbeat import Heartbeat
from chasqui.consuming.shared_slots import SharedSlots
from chasqui.consuming.takeover_pause import TakeoverPause
from chasqui.model import clock
from chasqui.running import process
from tests.hoarding import hoard
from tests.ledger import Ledger

SETTINGS = "CRASH_TEST_WORKER"
#: How often a held handler looks whether its gate is open.
GATE_POLL_S = 0.05


def make() -> Worker:
    """The worker that the environment describes."""
    told = json.loads(os.environ[SETTINGS])
    runs = Runs(Path(told["folder"]), told["who"], fails=told["fails"])
    if told["dies_before_flush"]:
        die_before_flush(runs.ledger, told["who"], told["dies_before_flush"])
    return Worker(told["queue"], runs.handlers(), consumer_id=told["who"], **told["options"])


def make_sharing() -> WorkerGroup:
    """The same, beside the worker of another queue with which it shares its slots."""
    worker = make()
    told = json.loads(os.environ[SETTINGS])
    other = Worker(f"{worker.name}-other", lambda job: None, consumer_id=told["who"])
    slots = SharedSlots(5, {other.name: 1, worker.name: 3}, mode="weight")
    return WorkerGroup([other, worker], name="both", slots=slots)


def make_hoarding() -> Worker:
    """The same, but that it keeps what it read ahead, however slow its handlers are."""
    hoard()
    return make()


def make_without_heartbeat() -> Worker:
    """The same, but that it renews no lease and believes it did."""

    def pretend(heartbeat: Heartbeat) -> int:
        heartbeat._held.renewed(clock.boot_s())
        return 0

    Heartbeat.run_once = pretend  # type: ignore[method-assign]
    return make()


def make_without_reclaiming() -> Worker:
    """The same, but that it takes nothing over: it always waits for others to come back."""
    TakeoverPause.until_s = lambda pause, replaced_s, now_s: now_s + 3600  # type: ignore[method-assign]
    return make()


def make_without_acks() -> Worker:
    """The same, but that it sends no ack and believes it did."""

    def pretend(acker: Acker, batch: Acks) -> None:
        acker._finished(batch)

    Acker._post = pretend  # type: ignore[method-assign]
    return make()


def make_and_end_soon() -> Worker:
    """The same, but that a drain has hardly more time than its deadline."""
    process.DRAIN_SLACK_S = 1.0  # type: ignore[misc]
    return make()


def make_without_threads() -> Worker:
    """The same, but that no thread can be started once a job ran."""
    worker = make()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    returned = Dispatcher._returned

    def return_and_refuse(self: Dispatcher, *arguments: Any) -> None:
        threading.Thread.start = refuse  # type: ignore[method-assign]
        returned(self, *arguments)

    Dispatcher._returned = return_and_refuse  # type: ignore[method-assign]
    return worker


def make_of_many() -> Worker:
    """The same, for several processes at once: the consumer is named for its process."""
    told = json.loads(os.environ[SETTINGS])
    runs = Runs(Path(told["folder"]), str(os.getpid()), fails=told["fails"])
    return Worker(told["queue"], runs.handlers(), **told["options"])


class Runs:
    """Handlers that keep the books. `fails`: the ones named for it raise when their gate opens."""

    def __init__(self, folder: Path, who: str, *, fails: bool = False) -> None:
        self.ledger = Ledger(folder)
        self._who = who
        self._gate = folder / f"gate-{who}"
        self._fails = fails

    def handlers(self) -> dict[str, Any]:
        return {
            "quick": self.quick,
            "work": self.work,
            "hold": self.hold,
            "hold, retry": self.hold_then_retry,
            "hold, bury": self.hold_then_bury,
            "long": self.long,
            "block": self.block,
            "ignore": self.ignore,
            "thread": self.thread,
            "loop_thread": self.loop_thread,
            "fail": self.fail,
            "bury": self.bury,
            "crash": self.crash,
        }

    async def quick(self, job: Job) -> int:
        self._start(job)
        self._end(job)
        return int(job.data["n"])

    async def work(self, job: Job) -> None:
        self._start(job)
        await asyncio.sleep(random.Random(job.data["n"]).uniform(0, 0.02))
        self._end(job)

    async def hold(self, job: Job) -> None:
        self._start(job)
        await self._wait()
        self._end(job)

    async def hold_then_retry(self, job: Job) -> None:
        self._start(job)
        await self._wait()
        if self._fails:
            self.ledger.write("fail", job.data["n"], self._who)
            raise RuntimeError("as told")
        self._end(job)

    async def hold_then_bury(self, job: Job) -> None:
        self._start(job)
        await self._wait()
        if self._fails:
            self.ledger.write("fail", job.data["n"], self._who)
            raise UnrecoverableError("as told")
        self._end(job)

    async def long(self, job: Job) -> None:
        self._start(job)
        await asyncio.sleep(job.data["s"])
        self._end(job)

    async def block(self, job: Job) -> None:
        self._start(job)
        time.sleep(job.data["s"])  # noqa: ASYNC251 - the mistake that must do no harm
        self._end(job)

    async def ignore(self, job: Job) -> None:
        self._start(job)
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    def thread(self, job: Job) -> None:
        self._start(job)
        time.sleep(job.data["s"])
        self._end(job)

    async def loop_thread(self, job: Job) -> None:
        self._start(job)
        await asyncio.to_thread(time.sleep, job.data["s"])
        self._end(job)

    async def fail(self, job: Job) -> None:
        self._start(job)
        self.ledger.write("fail", job.data["n"], self._who)
        raise RuntimeError("as told")

    async def bury(self, job: Job) -> None:
        self._start(job)
        self.ledger.write("fail", job.data["n"], self._who)
        raise UnrecoverableError("as told")

    async def crash(self, job: Job) -> None:
        self._start(job)
        os._exit(70)

    def _start(self, job: Job) -> None:
        self.ledger.write("start", job.data["n"], self._who)

    def _end(self, job: Job) -> None:
        self.ledger.write("end", job.data["n"], self._who)

    async def _wait(self) -> None:
        while not self._gate.exists():  # noqa: ASYNC110 - another process opens it
            await asyncio.sleep(GATE_POLL_S)


def die_before_flush(ledger: Ledger, who: str, flushes: int) -> None:
    """Let the process end when it is about to send its acks for the nth time."""
    post = Acker._post
    left = flushes

    def post_or_die(acker: Acker, batch: Acks) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            ledger.write("unflushed", acker.waiting + len(batch.ids), who)
            os._exit(71)
        post(acker, batch)

    Acker._post = post_or_die  # type: ignore[method-assign]
