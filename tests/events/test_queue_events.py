"""QueueEvents: every event once, whatever happens to the link, and no gap goes untold."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis as redis_py

from chasqui import (
    Queue,
    QueueEvent,
    QueueEvents,
    UnreachableError,
    UnrecoverableError,
    Worker,
    sync,
)
from chasqui.model.config import MAX_MS
from chasqui.model.keys import Keys
from tests.proxy import Fault, Proxy
from tests.servers import RemoteServer, Server

MakeProxy = Callable[[str], Proxy]


@pytest.fixture
def redis(server: Server | RemoteServer) -> Iterator[redis_py.Redis]:
    with redis_py.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def keys(queue_name: str) -> Keys:
    return Keys(queue_name)


def write(redis: redis_py.Redis, keys: Keys, *numbers: int) -> list[str]:
    """Events of jobs called by their numbers; the events' ids."""
    pipeline = redis.pipeline(transaction=False)
    for number in numbers:
        pipeline.xadd(
            keys.events, {"e": "active", "id": str(number), "ts": 1, "n": "mail", "attempt": 1}
        )
    return [event_id.decode() for event_id in pipeline.execute()]


async def take(events: QueueEvents, count: int) -> list[str | None]:
    async with asyncio.timeout(20):
        return [(await anext(events)).job_id for _ in range(count)]


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[None]:
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        await worker.close()
        await task


def as_given(event: QueueEvent) -> tuple[str, str | None, str]:
    return event.name, event.job_id, event.job_name


# ── Events as they are ──────────────────────────────────────────────────────────────────────────


async def test_the_life_of_jobs_is_told(server: Server, queue_name: str) -> None:
    async def handler(job: Any) -> None:
        if job.name == "bad":
            raise UnrecoverableError("no use")

    async with (
        Queue(queue_name, redis_url=server.url) as queue,
        QueueEvents(queue_name, redis_url=server.url) as events,
        working(Worker(queue_name, handler, redis_url=server.url, read_block_ms=100)),
    ):
        job = await queue.add("mail", {})
        told = []
        while "drained" not in [event.name for event in told]:
            told.append(await anext(events))
        assert [as_given(event) for event in told] == [
            ("active", job.id, "mail"),
            ("completed", job.id, "mail"),
            ("drained", None, ""),
        ]
        assert [event.fields.get("attempt") for event in told] == [1, 1, None]
        assert type(told[1].fields["duration_us"]) is int
        assert type(told[1].fields["ts"]) is int
        bad = await queue.add("bad", {})
        told = [await anext(events) for _ in range(3)]
        assert [as_given(event)[:2] for event in told] == [
            ("active", bad.id),
            ("failed", bad.id),
            ("dlq", bad.id),
        ]
        assert told[1].fields["reason"] == "no use"
        assert told[2].fields["reason"] == "unrecoverable"


async def test_whatever_stands_in_the_stream_is_read(
    server: Server, redis: redis_py.Redis, keys: Keys, queue_name: str
) -> None:
    long = "9" * 5000
    redis.xadd(keys.events, {"e": "new-kind", "id": "1", "ts": "soon", "attempt": long, "x": "7"})
    redis.xadd(keys.events, {"e": b"\xff", b"\xfe": b"\xfd", "backoff_ms": "12"})
    async with QueueEvents(queue_name, redis_url=server.url, last_event_id="0") as events:
        first, second = await anext(events), await anext(events)
    assert first == QueueEvent("new-kind", "1", "", {"ts": "soon", "attempt": long, "x": "7"})
    assert second == QueueEvent("\ufffd", None, "", {"\ufffd": "\ufffd", "backoff_ms": 12})
    with pytest.raises(AttributeError):
        first.name = "other"  # type: ignore[misc]


# ── Where a reader starts ───────────────────────────────────────────────────────────────────────


async def test_a_reader_starts_where_it_is_told(
    server: Server, redis: redis_py.Redis, keys: Keys, queue_name: str
) -> None:
    ids = write(redis, keys, 1, 2, 3)
    async with (
        QueueEvents(queue_name, redis_url=server.url, last_event_id="0") as all_of_them,
        QueueEvents(queue_name, redis_url=server.url, last_event_id=ids[1]) as behind,
        QueueEvents(queue_name, redis_url=server.url) as new,
    ):
        write(redis, keys, 4)
        assert await take(all_of_them, 4) == ["1", "2", "3", "4"]
        assert await take(behind, 2) == ["3", "4"]
        assert await take(new, 1) == ["4"]


async def test_a_reader_goes_on_where_another_stopped(
    server: Server, redis: redis_py.Redis, keys: Keys, queue_name: str
) -> None:
    write(redis, keys, *range(10))
    seen: list[str | None] = []
    place = "0"
    for _ in range(3):
        async with QueueEvents(queue_name, redis_url=server.url, last_event_id=place) as events:
            seen += await take(events, 3)
            place = events.last_event_id
    assert seen == [str(number) for number in range(9)]


async def test_events_are_chosen_by_kind_name_and_job(
    server: Server, redis: redis_py.Redis, keys: Keys, queue_name: str
) -> None:
    for event in ("active", "completed"):
        for job_id in ("a", "b"):
            for name in ("mail", "sms"):
                redis.xadd(keys.events, {"e": event, "id": job_id, "ts": 1, "n": name})
    last = {"e": "last", "id": "last", "n": "last"}
    redis.xadd(keys.events, last)

    async def chosen(**wanted: list[str]) -> list[tuple[str, str | None, str]]:
        """Those chosen, up to the last one of all, which is chosen too."""
        wanted = {option: [*values, "last"] for option, values in wanted.items()}
        async with QueueEvents(
            queue_name, redis_url=server.url, last_event_id="0", **wanted
        ) as events:
            found = [as_given(await anext(events))]
            while found[-1] != ("last", "last", "last"):
                found.append(as_given(await anext(events)))
            return found[:-1]

    assert len(await chosen()) == 8
    assert {event for event, _, _ in await chosen(events=["completed"])} == {"completed"}
    assert len(await chosen(events=["active", "completed"])) == 8
    assert await chosen(names=["sms"], job_ids=["b"]) == [
        ("active", "b", "sms"),
        ("completed", "b", "sms"),
    ]
    assert await chosen(events=["failed"], names=["sms"]) == []


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in (
        {"last_event_id": "now"},
        {"last_event_id": "1-"},
        {"last_event_id": 0},
        {"block_ms": -1},
        {"count": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            QueueEvents("q", **wrong)
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sync.QueueEvents("q", **wrong)
    with pytest.raises(TypeError, match="events must be a list"):
        QueueEvents("q", events="active")
    with pytest.raises(ValueError, match="queue name"):
        QueueEvents("a b")


def test_a_read_may_block_for_years(server: Server, queue_name: str, keys: Keys) -> None:
    with (
        redis_py.Redis.from_url(server.url) as redis,
        sync.QueueEvents(queue_name, redis_url=server.url, block_ms=MAX_MS) as events,
    ):
        writing = threading.Timer(0.1, write, (redis, keys, 1))
        writing.start()
        assert next(events).job_id == "1"
        writing.join()


# ── Lost links ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.GARBAGE])
async def test_a_lost_link_loses_and_repeats_nothing(
    redis_86: Server, queue_name: str, keys: Keys, make_proxy: MakeProxy, fault: Fault
) -> None:
    proxy = make_proxy(redis_86.url)
    with redis_py.Redis.from_url(redis_86.url) as redis:
        async with QueueEvents(queue_name, redis_url=proxy.url, count=3) as events:
            for nth in range(1, 5):
                proxy.fail(fault, "XREAD", nth=nth)
            write(redis, keys, *range(30))
            assert await take(events, 30) == [str(number) for number in range(30)]
            assert proxy.accepted > 2


async def test_from_now_on_means_from_the_start_although_the_link_was_lost(
    redis_86: Server, queue_name: str, keys: Keys, make_proxy: MakeProxy
) -> None:
    """`$` sent again over a new link would pass over what was written in between."""
    proxy = make_proxy(redis_86.url)
    with redis_py.Redis.from_url(redis_86.url) as redis:
        write(redis, keys, 1)
        events = QueueEvents(queue_name, redis_url=proxy.url)
        reading = asyncio.create_task(take(events, 2))
        await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("XREAD") == 1)
        proxy.is_refusing = True
        proxy.cut()
        write(redis, keys, 2, 3)
        proxy.is_refusing = False
        assert await reading == ["2", "3"]
        await events.close()


async def test_a_server_that_was_never_there_is_an_error() -> None:
    for place in ("$", "0"):
        events = QueueEvents("q", redis_url="redis://127.0.0.1:1", last_event_id=place)
        with pytest.raises(UnreachableError):
            await anext(events)
        with pytest.raises(UnreachableError):
            next(sync.QueueEvents("q", redis_url="redis://127.0.0.1:1", last_event_id=place))
        await events.close()


async def test_a_server_that_comes_back_is_read_again(
    private_server: Callable[..., Server], queue_name: str, keys: Keys
) -> None:
    server = private_server("redis-8.6", appendonly="yes")
    async with QueueEvents(queue_name, redis_url=server.url) as events:
        with redis_py.Redis.from_url(server.url) as redis:
            write(redis, keys, 1)
            assert await take(events, 1) == ["1"]
            write(redis, keys, 2)
        await asyncio.to_thread(server.restart)
        with redis_py.Redis.from_url(server.url) as redis:
            write(redis, keys, 3)
        assert await take(events, 2) == ["2", "3"]


# ── Gaps ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_gap_is_told_where_it_is(
    server: Server, redis: redis_py.Redis, keys: Keys, queue_name: str, caplog: Any
) -> None:
    async with QueueEvents(
        queue_name, redis_url=server.url, last_event_id="0", events=["active"]
    ) as events:
        ids = write(redis, keys, *range(10))
        assert await take(events, 10) == [str(number) for number in range(10)]
        left = write(redis, keys, *range(10, 20))[7:]
        redis.xtrim(keys.events, maxlen=3, approximate=False)
        with caplog.at_level(logging.WARNING, "chasqui"):
            gap = await anext(events)
        counts = server.name != "redis-6.2"
        fields = {"after": ids[-1], "before": left[0], "missed": 7 if counts else None}
        assert gap == QueueEvent("gap", None, "", fields)
        assert queue_name in caplog.text
        assert await take(events, 3) == ["17", "18", "19"]
        write(redis, keys, 20)
        assert await take(events, 1) == ["20"]


async def test_a_gap_with_nothing_behind_it_is_told(
    server: Server, redis: redis_py.Redis, keys: Keys, queue_name: str
) -> None:
    async with QueueEvents(queue_name, redis_url=server.url, block_ms=50) as events:
        write(redis, keys, 1, 2)
        redis.xtrim(keys.events, maxlen=0, approximate=False)
        counts = server.name != "redis-6.2"
        gap = await anext(events)
        assert (gap.name, gap.fields["missed"]) == ("gap", 2 if counts else None)
        write(redis, keys, 3)
        if not counts:  # there it cannot be told from a second one
            assert (await anext(events)).name == "gap"
        assert await take(events, 1) == ["3"]


async def test_trimming_what_was_read_makes_no_gap(
    redis_86: Server, valkey_9: Server, keys: Keys, queue_name: str
) -> None:
    for server in (redis_86, valkey_9):
        with redis_py.Redis.from_url(server.url) as redis:
            async with QueueEvents(queue_name, redis_url=server.url, last_event_id="0") as events:
                for number in range(0, 40, 2):
                    write(redis, keys, number, number + 1)
                    assert await take(events, 2) == [str(number), str(number + 1)]
                    redis.xtrim(keys.events, maxlen=0, approximate=False)


async def test_a_start_before_the_first_event_of_all_is_no_gap(
    redis_86: Server, keys: Keys, queue_name: str
) -> None:
    with redis_py.Redis.from_url(redis_86.url) as redis:
        write(redis, keys, 1)
        async with QueueEvents(
            queue_name, redis_url=redis_86.url, last_event_id="1000-5"
        ) as events:
            assert await take(events, 1) == ["1"]


# ── Ends ────────────────────────────────────────────────────────────────────────────────────────


async def test_closing_ends_the_iteration(
    redis_86: Server, queue_name: str, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    events = QueueEvents(queue_name, redis_url=proxy.url)
    assert events.name == queue_name

    async def read() -> list[QueueEvent]:
        return [event async for event in events]

    reading = asyncio.create_task(read())
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("XREAD") == 1)
    await events.close()
    await events.close()
    assert await reading == []
    assert events.is_closed


async def test_a_cancelled_read_takes_no_event_with_it(
    redis_86: Server, keys: Keys, queue_name: str, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    with redis_py.Redis.from_url(redis_86.url) as redis:
        async with QueueEvents(queue_name, redis_url=proxy.url) as events:
            reading = asyncio.create_task(anext(events))
            await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("XREAD") == 1)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            write(redis, keys, 1, 2)
            assert await take(events, 2) == ["1", "2"]


async def test_cancelled_reads_do_not_queue_up(
    redis_86: Server, keys: Keys, queue_name: str, make_proxy: MakeProxy
) -> None:
    """As of one who looks now and then: each would block at the server behind the others."""
    proxy = make_proxy(redis_86.url)
    with redis_py.Redis.from_url(redis_86.url) as redis:
        async with QueueEvents(queue_name, redis_url=proxy.url) as events:
            for _ in range(5):
                reading = asyncio.create_task(anext(events))
                await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("XREAD") >= 1)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            write(redis, keys, 1)
            assert await take(events, 1) == ["1"]
            assert proxy.count("XREAD") == 1


async def test_tasks_that_share_a_reader_share_the_events(
    redis_86: Server, keys: Keys, queue_name: str, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    with redis_py.Redis.from_url(redis_86.url) as redis:
        async with QueueEvents(queue_name, redis_url=proxy.url) as events:
            sharing = asyncio.gather(take(events, 2), take(events, 2))
            await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("XREAD") >= 1)
            write(redis, keys, 1, 2, 3, 4)
            first, second = await sharing
            assert sorted([*first, *second], key=str) == ["1", "2", "3", "4"]


def test_a_repr_shows_no_password() -> None:
    for kind in (QueueEvents, sync.QueueEvents):
        assert "Kanari" not in repr(kind("q", redis_url="redis://u:Kanari@localhost:1"))


# ── Without an event loop ───────────────────────────────────────────────────────────────────────


def test_the_plain_iterator_gives_the_same(
    server: Server, redis: redis_py.Redis, keys: Keys, queue_name: str
) -> None:
    write(redis, keys, *range(5))
    with sync.QueueEvents(queue_name, redis_url=server.url, last_event_id="0", count=2) as events:
        assert [next(events).job_id for _ in range(5)] == ["0", "1", "2", "3", "4"]
        place = events.last_event_id
    write(redis, keys, *range(5, 9))
    redis.xtrim(keys.events, maxlen=2, approximate=False)
    with sync.QueueEvents(queue_name, redis_url=server.url, last_event_id=place) as events:
        told = [next(events) for _ in range(3)]
    assert [event.name for event in told] == ["gap", "active", "active"]
    assert [event.job_id for event in told] == [None, "7", "8"]


def test_the_plain_iterator_outlives_its_links(
    redis_86: Server, keys: Keys, queue_name: str, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    with (
        redis_py.Redis.from_url(redis_86.url) as redis,
        sync.QueueEvents(queue_name, redis_url=proxy.url, count=3) as events,
    ):
        proxy.fail(Fault.CUT_AFTER, "XREAD", nth=2, times=2)
        write(redis, keys, *range(20))
        assert [next(events).job_id for _ in range(20)] == [str(number) for number in range(20)]


def test_the_plain_iterator_ends_when_another_thread_closes_it(
    redis_86: Server, queue_name: str, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(redis_86.url)
    events = sync.QueueEvents(queue_name, redis_url=proxy.url)
    seen: list[list[QueueEvent]] = []
    thread = threading.Thread(target=lambda: seen.append(list(events)))
    thread.start()
    proxy.wait_for(lambda: proxy.count("XREAD") == 1)
    events.close()
    thread.join(20)
    assert seen == [[]]
