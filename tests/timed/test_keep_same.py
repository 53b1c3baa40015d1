"""`upsert_repeatable_job(keep_same=True)` writes only what has changed, on every server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis as redis_py

from chasqui import BackoffSpec, MissedFiresPolicy, Queue, RepeatPattern, sync
from chasqui.model.keys import Keys
from tests.servers import Server

HOURLY = RepeatPattern.every(3_600_000)


@pytest.fixture
async def queue(server: Server, queue_name: str) -> AsyncIterator[Queue]:
    async with Queue(queue_name, redis_url=server.url) as queue:
        yield queue


@pytest.fixture
def moved(server: Server, queue_name: str) -> Any:
    """Moves the next fire of the spec "k", and says whether it is still there."""
    keys = Keys(queue_name)
    client = redis_py.Redis.from_url(server.url)

    def move() -> None:
        client.zadd(keys.repeat, {"k": 4_000_000_000_000})

    def is_kept() -> bool:
        return client.zscore(keys.repeat, "k") == 4_000_000_000_000

    yield move, is_kept, client, keys
    client.close()


FULL: dict[str, Any] = {
    "repeat": RepeatPattern.cron("0 2 * * *", tz="Europe/Berlin"),
    "limit": 5,
    "start_after_ms": 5_000,
    "end_before_ms": 4_100_000_000_000,
    "attempts": 3,
    "backoff": BackoffSpec.fixed(5),
    "missed_fires": MissedFiresPolicy.fire_all(3),
}


@pytest.mark.parametrize("options", [{"repeat": HOURLY}, FULL], ids=["plain", "full"])
async def test_what_is_the_same_keeps_its_next_fire(
    queue: Queue, moved: Any, options: dict[str, Any]
) -> None:
    move, is_kept, _, _ = moved
    for _ in range(2):
        job = await queue.upsert_repeatable_job("n", {"a": 1}, key="k", keep_same=True, **options)
        assert job.id == "k"
        move()
    await queue.upsert_repeatable_job("n", {"a": 1}, key="k", keep_same=True, **options)
    assert is_kept()
    await queue.upsert_repeatable_job("n", {"a": 1}, key="k", **options)
    assert not is_kept(), "without keep_same it is written anew"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "m"},
        {"data": {"a": 2}},
        {"repeat": HOURLY},
        {"repeat": RepeatPattern.cron("0 2 * * *")},
        {"limit": None},
        {"start_after_ms": 6_000},
        {"end_before_ms": 4_100_000_000_001},
        {"attempts": None, "backoff": None},
        {"attempts": 4},
        {"missed_fires": None},
    ],
    ids=lambda change: "-".join(change),
)
async def test_every_change_is_written(queue: Queue, moved: Any, change: dict[str, Any]) -> None:
    move, is_kept, _, _ = moved
    given: dict[str, Any] = {"name": "n", "data": {"a": 1}, **FULL}
    await queue.upsert_repeatable_job(key="k", keep_same=True, **given)
    move()
    await queue.upsert_repeatable_job(key="k", keep_same=True, **{**given, **change})
    assert not is_kept()
    move()
    await queue.upsert_repeatable_job(key="k", keep_same=True, **{**given, **change})
    assert is_kept(), "and then it is the same again"


async def test_what_is_damaged_is_written_anew(queue: Queue, moved: Any) -> None:
    move, is_kept, client, keys = moved

    async def write() -> None:
        await queue.upsert_repeatable_job("n", 1, repeat=HOURLY, key="k", keep_same=True)

    await write()
    move()
    client.hset(keys.repeat_spec("k"), "spec", b"\xc1")
    await write()
    assert not is_kept()
    (spec,) = await queue.get_repeatable_jobs()
    assert spec.pattern == HOURLY
    client.zrem(keys.repeat, "k")  # a spec without its time would never fire
    await write()
    assert client.zscore(keys.repeat, "k") is not None


def test_the_blocking_queue_does_the_same(server: Server, queue_name: str, moved: Any) -> None:
    move, is_kept, _, _ = moved
    with sync.Queue(queue_name, redis_url=server.url) as queue:
        for _ in range(2):
            queue.upsert_repeatable_job("n", 1, repeat=HOURLY, key="k", keep_same=True)
            move()
        queue.upsert_repeatable_job("n", 1, repeat=HOURLY, key="k", keep_same=True)
        assert is_kept()
        queue.upsert_repeatable_job("n", 2, repeat=HOURLY, key="k", keep_same=True)
        assert not is_kept()
