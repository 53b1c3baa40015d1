"""What the processes do that are broken off at each command: one operation each, to its end.

Each takes the URL to work on, where links break, and another one to look at the facts by.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from chasqui import Promoter, Queue, Scheduler, Worker, sync
from chasqui._core.envelope import encode_envelope
from chasqui.consuming import appetite
from chasqui.consuming.acker import Acker
from chasqui.consuming.appetite import Appetite
from chasqui.consuming.takeover_pause import TakeoverPause
from chasqui.errors import UnreachableError
from chasqui.managing import consumers
from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE, Keys
from chasqui.model.payload import encode
from chasqui.producing.flows import FlowPlan, Step
from chasqui.producing.new_jobs import CHUNK_JOBS
from chasqui.timed import fire_calls
from tests.crash.workers import Runs
from tests.hoarding import hoard
from tests.ledger import HANDED_BACK_MS, Ledger, number

#: Two chunks and a bit.
BULK = 2 * CHUNK_JOBS + 5
#: Whoever takes over bears the same name: so nobody waits for a lease to end.
NAME = "one"
#: A consumer that holds nothing, and whose process is gone.
GONE = "gone"
FAR_MS = 600_000
#: The id of the flows that begin, go on and fail here.
FLOW = "flow"
POLL_S = 0.005

# ── Producing ───────────────────────────────────────────────────────────────────────────────────


class Producing:
    """A producer's program: a step of a queue, asyncio or blocking, and the books on it.

    It adds jobs of these numbers, or it removes them.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        adds: range = range(0),
        *,
        removes: range = range(0),
        is_blocking: bool,
    ) -> None:
        self._step, self._adds, self._removes = step, adds, removes
        self._is_blocking = is_blocking

    def __call__(self, url: str, direct_url: str, queue_name: str, folder: str) -> None:
        ledger = Ledger(Path(folder))
        for n in self._adds:
            ledger.write("try", n, NAME)
        for n in self._removes:
            ledger.write("gone", n, NAME)
        try:
            if self._is_blocking:
                with sync.Queue(queue_name, redis_url=url) as queue:
                    self._step(queue)
            else:
                asyncio.run(self._run(url, queue_name))
        except UnreachableError:
            outcome = "refused"  # it is said that nothing was sent
        else:
            outcome = "added"
        for n in self._adds:
            ledger.write(outcome, n, NAME)

    async def _run(self, url: str, queue_name: str) -> None:
        async with Queue(queue_name, redis_url=url) as queue:
            await self._step(queue)


def add(queue: Any) -> Any:
    return queue.add("quick", {"n": 0})


def add_with_id(queue: Any) -> Any:
    return queue.add("quick", {"n": 0}, job_id="mine")


def delay(queue: Any) -> Any:
    return queue.add("quick", {"n": 0}, delay_ms=FAR_MS)


def delay_with_id(queue: Any) -> Any:
    return queue.add("quick", {"n": 0}, delay_ms=FAR_MS, job_id="mine")


def bulk(queue: Any) -> Any:
    return queue.add_bulk([{"name": "quick", "data": {"n": n}} for n in range(BULK)])


def mixed_bulk(queue: Any) -> Any:
    """Every job has an id, every other one is delayed."""
    return queue.add_bulk(
        [
            {"name": "quick", "data": {"n": n}, "job_id": f"id-{n}", "delay_ms": n % 2 * FAR_MS}
            for n in range(BULK)
        ]
    )


def begin_flow(queue: Any) -> Any:
    chains = [[Step("quick", {"n": n})] for n in range(BULK)]
    return queue.add_flow(FlowPlan(chains, [Step("quick", {"n": BULK}, "all")]), flow_id=FLOW)


def cancel(queue: Any) -> Any:
    return queue.cancel_delayed("id-0")


def reschedule(queue: Any) -> Any:
    return queue.reschedule("id-0", delay_ms=2 * FAR_MS)


def replay(queue: Any) -> Any:
    return queue.replay_dlq(10 * BULK)


def delete_dead(queue: Any) -> Any:
    return queue.delete_dlq(10 * BULK)


def free(queue: Any) -> Any:
    return queue.free_job_id("id-0")


# ── Duties ──────────────────────────────────────────────────────────────────────────────────────


def promote(url: str, direct_url: str, queue_name: str, folder: str) -> None:
    """Promote until nothing is delayed."""
    engine = Promoter(url, queue_name, holder_id=NAME, promote_batch=3)
    with redis.Redis.from_url(direct_url) as client:
        asyncio.run(_attend(engine, lambda: not client.exists(Keys(queue_name).delayed)))


def fire(url: str, direct_url: str, queue_name: str, folder: str) -> None:
    """Fire until no spec is left."""
    engine = Scheduler(url, queue_name, holder_id=NAME, batch=3)
    with redis.Redis.from_url(direct_url) as client:
        asyncio.run(_attend(engine, lambda: not client.exists(Keys(queue_name).repeat)))


def fire_in_steps(url: str, direct_url: str, queue_name: str, folder: str) -> None:
    """The same, with hardly anything in one call."""
    fire_calls.FIRES_PER_CALL = 2  # type: ignore[misc]
    fire(url, direct_url, queue_name, folder)


def sweep(url: str, direct_url: str, queue_name: str, folder: str) -> None:
    """Lead until the consumer that is gone is listed no more. Whoever holds nothing is gone."""
    consumers.SILENCE_MS = 0  # type: ignore[misc]
    engine = Promoter(url, queue_name, holder_id=NAME)
    with redis.Redis.from_url(direct_url) as client:
        asyncio.run(_attend(engine, lambda: GONE not in listed(client, Keys(queue_name))))


def listed(client: redis.Redis, keys: Keys) -> list[str]:
    """The consumers of the group."""
    found = client.xinfo_consumers(keys.stream, DEFAULT_GROUP)
    return [consumer["name"].decode() for consumer in found]


# ── Workers ─────────────────────────────────────────────────────────────────────────────────────


class Working:
    """A worker's program: run jobs until a fact is true, then drain. `patch` changes what workers
    of its process do."""

    def __init__(
        self,
        fact: Callable[["Working", redis.Redis], object],
        *,
        patch: Callable[[], None] = hoard,
        **options: Any,
    ) -> None:
        self._fact, self._patch, self._options = fact, patch, options

    def __call__(self, url: str, direct_url: str, queue_name: str, folder: str) -> None:
        self.keys = Keys(queue_name)
        self.gate = Path(folder) / f"gate-{os.getpid()}"
        self._ledger = Ledger(Path(folder))
        self._idle_ms: dict[Any, int] = {}
        self.renewals = 0
        self._patch()
        worker = Worker(
            queue_name,
            Runs(Path(folder), str(os.getpid())).handlers(),
            redis_url=url,
            consumer_id=NAME,
            delayed_enabled=False,
            run_scheduler=False,
            **{"claim_min_idle_ms": 60_000, "events_enabled": False} | self._options,
        )
        asyncio.run(self._work(worker, direct_url))

    async def _work(self, worker: Worker, direct_url: str) -> None:
        running = asyncio.ensure_future(worker.run())
        with redis.Redis.from_url(direct_url) as client:
            await _poll(lambda: running.done() or self._fact(self, client))
            await worker.close()
            # What runs may end when the rest was handed back.
            await _poll(lambda: running.done() or self._kept(client) <= 1)
            self.gate.touch()
            await running

    def is_done(self, client: redis.Redis) -> bool:
        return not client.xlen(self.keys.stream)

    def holds_all(self, client: redis.Redis) -> bool:
        """It runs one and holds the others."""
        return self._has_begun() and len(self._pending(client)) == client.xlen(self.keys.stream)

    def lets_go(self, client: redis.Redis) -> bool:
        """It holds the one that it runs, and no other; then its handlers may end."""
        if self._has_begun() and self._kept(client) <= 1:
            self.gate.touch()
        return self.is_done(client)

    def is_renewed(self, client: redis.Redis) -> bool:
        """Its lease was renewed twice: idle times went down; then its handler may end."""
        for held in self._pending(client):
            before = self._idle_ms.get(held["message_id"], 0)
            self._idle_ms[held["message_id"]] = held["time_since_delivered"]
            self.renewals += held["time_since_delivered"] < before
        if self.renewals >= 2:
            self.gate.touch()
        return self.is_done(client)

    def _has_begun(self) -> bool:
        return any(fact.who == str(os.getpid()) for fact in self._ledger.read("start"))

    def _kept(self, client: redis.Redis) -> int:
        idle_ms = [held["time_since_delivered"] for held in self._pending(client)]
        return sum(one < HANDED_BACK_MS for one in idle_ms)

    def _pending(self, client: redis.Redis) -> list[dict[str, Any]]:
        try:
            return client.xpending_range(self.keys.stream, DEFAULT_GROUP, "-", "+", 10)
        except redis.ResponseError:  # there is no group yet
            return []


def doubt() -> None:
    """Let workers of this process be sure of no lease when they acknowledge."""
    hoard()
    Acker._are_ours = lambda self, ids, sure_for_s: False  # type: ignore[method-assign]


def read_ahead_once() -> None:
    """Let workers of this process read ahead until they have judged, soon, what waits too long."""
    hoard()
    appetite.HOLD_S = 0.02  # type: ignore[misc]
    TakeoverPause.until_s = lambda self, replaced_s, now_s: 0.0  # type: ignore[method-assign] # no others

    def judge(self: Appetite) -> int:
        if excess := _excess(self):
            Appetite._ahead = lambda self: 0  # type: ignore[method-assign]
        return excess

    Appetite.excess = judge  # type: ignore[method-assign]


_excess = Appetite.excess


# ── Controls: the same in steps that are not one ────────────────────────────────────────────────


class Careless:
    """A worker that buries a job with several commands, and begins anew whenever a link breaks."""

    def __init__(self, *, is_ack_first: bool) -> None:
        self._is_ack_first = is_ack_first

    def __call__(self, url: str, direct_url: str, queue_name: str, folder: str) -> None:
        _stubbornly(url, lambda client: self._bury(client, Keys(queue_name)))

    def _bury(self, client: redis.Redis, keys: Keys) -> None:
        with contextlib.suppress(redis.ResponseError):
            client.xgroup_create(keys.stream, DEFAULT_GROUP, "0", mkstream=True)
        client.xreadgroup(DEFAULT_GROUP, NAME, {keys.stream: ">"})
        ((_, entries),) = client.xreadgroup(DEFAULT_GROUP, NAME, {keys.stream: "0"})
        for entry_id, fields in entries:
            if not self._is_ack_first:
                client.xadd(keys.dlq, fields)
            client.xack(keys.stream, DEFAULT_GROUP, entry_id)
            client.xdel(keys.stream, entry_id)
            if self._is_ack_first:
                client.xadd(keys.dlq, fields)


class CarelessStep:
    """A worker that ends a step and adds the next one with several commands, in the same way."""

    def __init__(self, *, is_ack_first: bool) -> None:
        self._is_ack_first = is_ack_first

    def __call__(self, url: str, direct_url: str, queue_name: str, folder: str) -> None:
        ledger = Ledger(Path(folder))
        _stubbornly(url, lambda client: self._go_on(client, Keys(queue_name), ledger))

    def _go_on(self, client: redis.Redis, keys: Keys, ledger: Ledger) -> None:
        with contextlib.suppress(redis.ResponseError):
            client.xgroup_create(keys.stream, DEFAULT_GROUP, "0", mkstream=True)
        client.xreadgroup(DEFAULT_GROUP, NAME, {keys.stream: ">"})
        ((_, entries),) = client.xreadgroup(DEFAULT_GROUP, NAME, {keys.stream: "0"})
        next_one = {ENVELOPE: encode_envelope(f"~{FLOW}~0.1", encode({"n": 1}), 0, 0)}
        for entry_id, fields in entries:
            if number(fields[ENVELOPE]) != 0:
                continue
            ledger.write("end", 0, NAME)
            if not self._is_ack_first:
                client.xadd(keys.stream, next_one)
            client.xack(keys.stream, DEFAULT_GROUP, entry_id)
            client.xdel(keys.stream, entry_id)
            if self._is_ack_first:
                client.xadd(keys.stream, next_one)


def add_carelessly(url: str, direct_url: str, queue_name: str, folder: str) -> None:
    """Add again after each broken link, with nothing to know the job by."""
    ledger = Ledger(Path(folder))
    ledger.write("try", 0, NAME)
    fields = {ENVELOPE: encode_envelope("any", encode({"n": 0}), 0, 0)}
    _stubbornly(url, lambda client: client.xadd(Keys(queue_name).stream, fields))
    ledger.write("added", 0, NAME)


def _stubbornly(url: str, step: Callable[[redis.Redis], object]) -> None:
    while True:
        with (
            contextlib.suppress(redis.ConnectionError),
            redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0)) as client,
        ):
            step(client)
            return


async def _attend(engine: Promoter | Scheduler, is_done: Callable[[], object]) -> None:
    running = asyncio.ensure_future(engine.run())
    await _poll(lambda: running.done() or is_done())
    engine.shutdown()
    await running


async def _poll(fact: Callable[[], object]) -> None:
    while not fact():  # noqa: ASYNC110 - only the server knows
        await asyncio.sleep(POLL_S)
