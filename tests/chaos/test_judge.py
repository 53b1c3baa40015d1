"""The judge, on books that are made up: what has no cause is seen, and what has one is let pass."""

from collections.abc import Callable

import pytest
import redis

from chasqui import sync
from chasqui.model.keys import DEFAULT_GROUP
from tests.chaos import stale
from tests.chaos.judge import SILENT_JOBS, Result, numbers_anywhere, silent, uncaused
from tests.chaos.programs.common import mark
from tests.chaos.scene import Record
from tests.chaos.stage import QUEUE, Stage
from tests.chaos.stale import Stale
from tests.chaos.subjects import SUBJECTS
from tests.facts import Fact
from tests.ledger import HANDED_BACK_MS
from tests.servers import Server

LEASE_S = 3.0
#: Job 7 in the hands of two at once, and jobs 8 and 9 in those of one after the other.
BOOKS = [
    Fact("start", 7, "a", 10.0),
    Fact("start", 8, "a", 10.0),
    Fact("end", 8, "a", 10.5),
    Fact("start", 9, "a", 10.5),
    Fact("bury", 9, "a", 10.6),
    Fact("start", 7, "b", 14.0),
    Fact("end", 7, "a", 14.5),
    Fact("end", 7, "b", 15.0),
    Fact("start", 8, "b", 18.0),
    Fact("start", 9, "b", 18.0),
]


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (None, [7, 8, 9]),
        (Record("another was stopped", 10.5, 14.2, struck={"b", "c"}), [7, 8, 9]),
        (Record("it was stopped long before", 1.0, 3.9, struck={"a"}), [7, 8, 9]),
        (Record("it was stopped long after all", 16.7, 18.0, struck={"a"}), [7, 8, 9]),
        (Record("it was stopped soon after two", 16.4, 18.0, struck={"a"}), [7]),
        (Record("it was stopped", 10.2, 14.2, struck={"a"}), []),
    ],
)
def test_a_second_run_needs_a_fault_that_struck_the_first(
    record: Record | None, found: list[int]
) -> None:
    assert uncaused(BOOKS, [record] if record else [], LEASE_S) == found


def test_two_runs_at_once_without_a_cause_are_a_violation() -> None:
    assert Result(overlapping=1).violations == []
    assert Result(overlapping=1, uncaused=1).violations == ["uncaused: 1"]


@pytest.mark.parametrize(
    ("records", "is_stuck"),
    [
        ([], True),
        ([Record("short", 80.0, 81.0), Record("at once", 80.5, 80.7)], True),
        ([Record("before", 1.0, 40.0)], True),
        ([Record("all the time", 40.0, 91.0)], False),
        ([Record("one", 84.0, 86.0), Record("another", 85.5, 87.0)], False),
    ],
)
def test_what_is_left_alone_with_no_fault_at_work_is_stuck(
    records: list[Record], is_stuck: bool
) -> None:
    idle_s = (stale.LEASES + stale.CALM_LEASES) * LEASE_S + 2
    found = stale.stuck([Stale(7, 90.0, idle_s)], records, LEASE_S)
    assert found == ({7} if is_stuck else set())


@pytest.mark.parametrize(
    ("others", "who"),
    [
        ([], ["worker-1.1"]),
        ([Record("of another one", 17.0, 18.0, "worker-2.1")], ["worker-1.1"]),
        ([Record("of the server", 17.0, 18.0, "server")], ["worker-1.1"]),
        ([Record("killed", 17.0, 18.0, "worker-1.1")], []),
        ([Record("a restart", 17.0, 18.0, "all workers")], []),
    ],
)
def test_a_worker_that_does_nothing_any_more_is_seen(others: list[Record], who: list[str]) -> None:
    cut = Record("its link was cut", 9.0, 10.0, "worker-1.1", awaits=("worker-1.1",))
    books = [Fact("end", n, "worker-2.1", 10 + n / 100) for n in range(2 * SILENT_JOBS)]
    assert silent(books, [cut, *others], LEASE_S) == who
    assert silent([*books, Fact("end", 1, "worker-1.1", 99.0)], [cut], LEASE_S) == []
    assert silent(books[:SILENT_JOBS], [cut], LEASE_S) == []


@pytest.mark.parametrize(("ended_s", "who"), [(10.5, []), (29.0, ["worker-1.1"])])
def test_a_worker_that_ended_is_not_waited_for(ended_s: float, who: list[str]) -> None:
    cut = Record("its link was cut", 9.0, 10.0, "worker-1.1", awaits=("worker-1.1",))
    books = [Fact("end", n, "worker-2.1", 10 + n / 100) for n in range(2 * SILENT_JOBS)]
    assert silent([*books, Fact("dead", -1, "worker-1.1", ended_s)], [cut], LEASE_S) == who


@pytest.mark.slow
@pytest.mark.parametrize("server", ["redis-8.6", "redis-6.2", "valkey-9"])
def test_what_nobody_renews_is_seen(server: str) -> None:
    sizes = {"jobs": 3, "workers": 1, "producers": 1, "lease_ms": 1_000}
    with Stage(SUBJECTS["chasqui"], server, **sizes) as stage:
        assert stale.look(stage) == []
        with sync.Queue(QUEUE, redis_url=stage.server.url) as queue:
            queue.add_bulk([{"name": "work", "data": {"n": n}} for n in range(3)])
        stream, limit_ms = stage.keys.stream, (stale.LEASES + stale.CALM_LEASES) * 1000
        stage.client.xgroup_create(stream, DEFAULT_GROUP, "0")
        ((_, entries),) = stage.client.xreadgroup(DEFAULT_GROUP, "w", {stream: ">"}, count=3)
        for (entry_id, _), idle_ms in zip(
            entries[1:], (limit_ms + 500, HANDED_BACK_MS), strict=True
        ):
            ids, options = [entry_id], {"idle": idle_ms, "justid": True}
            stage.client.xclaim(stream, DEFAULT_GROUP, "w", 0, ids, **options)
        (found,) = stale.look(stage)
        assert found.n == 1
        assert found.idle_s > limit_ms / 1000


@pytest.mark.slow
def test_a_job_is_found_in_whatever_key_it_is(private_server: Callable[..., Server]) -> None:
    with redis.Redis.from_url(private_server("valkey-9").url) as client:
        assert numbers_anywhere(client) == set()
        client.set("string", mark(1))
        client.rpush("list", "other", mark(2))
        client.hset("hash", "field", mark(3))
        client.zadd("zset", {mark(4): 0})
        client.sadd("set", mark(5))
        client.set(mark(6), "in the key's name")
        client.xadd("unread", {"data": mark(7)})
        for n in (8, 9, 10):
            client.xadd("read", {"data": mark(n)})
        client.xgroup_create("read", "group", "0")
        ((_, entries),) = client.xreadgroup("group", "w", {"read": ">"}, count=2)
        client.xack("read", "group", entries[0][0])
        assert numbers_anywhere(client) == {1, 2, 3, 4, 5, 6, 7, 9, 10}
