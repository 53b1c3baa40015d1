"""How many runs a job has, who says so, and how a handler knows which is the last one."""

import copy
import dataclasses
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from chasqui import BackoffSpec, Job, WorkerConfig, sync
from chasqui.metrics import RetryScheduled
from chasqui.queue import Queue
from tests.consuming import handlers
from tests.consuming.conftest import Running

ONE_SERVER = pytest.mark.parametrize("server", ["valkey-9"], indirect=True)
AT_ONCE = BackoffSpec.fixed(1, jitter_ms=0)

Start = Callable[..., Running]
Dead = Callable[[], Awaitable[list[dict[bytes, bytes]]]]


async def on_the_loop(job: Job) -> list[Any]:
    return handlers.attempts(job)


async def in_a_batch(jobs: list[Job]) -> list[Any]:
    return handlers.attempts_of_batch(jobs)


@ONE_SERVER
@pytest.mark.parametrize(
    ("handler", "options"),
    [
        (on_the_loop, {}),
        (handlers.attempts, {}),
        (in_a_batch, {"batch": 1}),
        (handlers.attempts_of_batch, {"batch": 1}),
        pytest.param(handlers.attempts, {"processes": 1}, marks=pytest.mark.slow),
        pytest.param(
            handlers.attempts_of_batch, {"processes": 1, "batch": 1}, marks=pytest.mark.slow
        ),
    ],
    ids=["async", "thread", "batch", "batch in a thread", "process", "batch in a process"],
)
async def test_every_handler_knows_whether_its_run_is_the_last(
    queue: Queue, start: Start, dead: Dead, handler: Any, options: dict[str, Any]
) -> None:
    running = start(handler, max_attempts=3, store_results=True, concurrency=1, **options)
    own = await queue.add("n", None, attempts=2, backoff=AT_ONCE)
    of_worker = await queue.add("n", None, backoff=AT_ONCE)
    only = await queue.add("n", None, attempts=1)
    assert await running.result(queue, own.id) == [1, 2, True]
    assert await running.result(queue, of_worker.id) == [1, 3, False]
    await running.buried(1)
    (buried,) = await dead()
    assert buried[b"error"] == b"ValueError: [0, 1, True]"
    assert only.max_attempts is None
    assert not only.is_last_attempt


def test_a_job_that_was_added_does_not_know() -> None:
    for job in (Job("1", "n", None), sync.Job("1", "n", None)):
        assert job.max_attempts is None
        assert not job.is_last_attempt
        assert len(job.__reduce__()[1]) == 6, "and takes no more room where it is pickled"


@ONE_SERVER
async def test_a_copy_knows_as_much_as_the_job(queue: Queue, start: Start) -> None:
    async def handler(job: Job) -> list[Any]:
        copies = [
            pickle.loads(pickle.dumps(job)),
            pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(job)))),
            copy.copy(job),
            dataclasses.replace(job, data=None),
        ]
        assert not any(one.lost for one in copies)
        return [[one.max_attempts, one.is_last_attempt] for one in copies]

    running = start(handler, store_results=True)
    job = await queue.add("n", 1, attempts=1)
    assert await running.result(queue, job.id) == [[1, True]] * 4


# ── By name ─────────────────────────────────────────────────────────────────────────────────────


@ONE_SERVER
async def test_attempts_and_backoff_by_name(queue: Queue, start: Start, dead: Dead) -> None:
    """Jobs that were queued before the worker began go by them too. Two names share a handler."""
    names = ["mail", "letter", "own", "own"]
    await queue.add_bulk([{"name": name, "data": None} for name in names[:3]])
    await queue.add("own", None, attempts=4, backoff=BackoffSpec.fixed(5, jitter_ms=0))
    runs: list[tuple[str, int | None, bool]] = []

    async def handler(job: Job) -> None:
        runs.append((job.name, job.max_attempts, job.is_last_attempt))
        raise ValueError

    running = start(
        dict.fromkeys(names, handler),
        max_attempts={"mail": 2, "letter": 3, "own": 1},
        backoff={"mail": AT_ONCE, "letter": {"kind": "fixed", "delay_ms": 7, "jitter_ms": 0}},
    )
    await running.buried(4)
    buried = [(entry[b"n"], entry[b"attempts"]) for entry in await dead()]
    assert sorted(buried) == [
        (b"letter", b"3"), (b"mail", b"2"), (b"own", b"1"), (b"own", b"4"),
    ]  # fmt: skip
    waits = {(one.name, one.backoff_ms) for one in running.metrics.all(RetryScheduled)}
    assert waits == {("mail", 1), ("letter", 7), ("own", 5)}
    assert sorted(runs) == [
        ("letter", 3, False), ("letter", 3, False), ("letter", 3, True),
        ("mail", 2, False), ("mail", 2, True),
        ("own", 1, True),
        ("own", 4, False), ("own", 4, False), ("own", 4, False), ("own", 4, True),
    ]  # fmt: skip


@ONE_SERVER
async def test_one_backoff_for_all(queue: Queue, start: Start) -> None:
    async def handler(jobs: list[Job]) -> None:
        raise ValueError

    running = start(handler, batch=2, max_attempts=2, backoff=BackoffSpec.fixed(3, jitter_ms=0))
    await queue.add_bulk([{"name": "n", "data": None}] * 2)
    await running.buried(2)
    assert {one.backoff_ms for one in running.metrics.all(RetryScheduled)} == {3}


@pytest.mark.parametrize(
    ("given", "for_all", "by_name"),
    [
        (None, 100, {}),
        (5, 5, {}),
        (BackoffSpec.fixed(6), 6, {}),
        ({"kind": "fixed", "delay_ms": 7}, 7, {}),
        ({}, 100, {}),
        ({"mail": 8}, 100, {"mail": 8}),
        # Names of jobs that a spec has too.
        ({"kind": 9, "mail": 8}, 100, {"kind": 9, "mail": 8}),
        ({"kind": BackoffSpec.fixed(9)}, 100, {"kind": 9}),
        ({"delay_ms": {"kind": "fixed", "delay_ms": 3}}, 100, {"delay_ms": 3}),
    ],
)
def test_a_mapping_by_name_is_not_taken_for_a_spec(
    given: Any, for_all: int, by_name: dict[str, int]
) -> None:
    limits = WorkerConfig(backoff=given).limits
    assert limits.backoff.delay_ms == for_all
    assert {name: one.delay_ms for name, one in limits.backoff_by_name.items()} == by_name
