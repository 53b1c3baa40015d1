"""Calls are jobs like all others: the bytes that leave are those of `Queue.add` and `add_bulk`."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import chasqui
from chasqui import App, BackoffSpec, sync
from tests.frames.normal import Normal
from tests.frames.recording import scene_lines
from tests.frames.scripts import Scripts
from tests.frames.tap import Tap
from tests.servers import Server

T0_MS = 1_794_797_194_137
HOUR = timedelta(hours=1)
MOMENT = datetime.fromtimestamp(T0_MS // 1000, UTC) + HOUR
IDS = [UUID(int=number) for number in range(3)]


class Recorder:
    """Plays what clients do, and gives the commands that they sent, as text."""

    def __init__(self, server: Server, queue: str) -> None:
        self.queue = queue
        self._tap = Tap(server.port)
        self.url = self._tap.url
        self._normal = Normal(Scripts(Path(chasqui.__file__).parent), T0_MS)

    def sent(self) -> list[str]:
        frames = [[self._normal.command(one) for one in sent] for sent in self._tap.take()]
        return scene_lines(frames, is_loose=False)

    def close(self) -> None:
        self._tap.close()

    async def by_queue(self, *adds: Callable[[Any], Any]) -> list[str]:
        """What `adds` send, called with a queue."""
        async with chasqui.Queue(self.queue, redis_url=self.url) as queue:
            for add in adds:
                await add(queue)
        return self.sent()

    async def by_app(self, app: App[Any], *adds: Callable[[], Any]) -> list[str]:
        async with app:
            for add in adds:
                await add()
        return self.sent()

    async def by_sync_queue(self, *adds: Callable[[Any], Any]) -> list[str]:
        def play() -> None:
            with sync.Queue(self.queue, redis_url=self.url) as queue:
                for add in adds:
                    add(queue)

        await asyncio.to_thread(play)
        return self.sent()

    async def by_app_sync(self, app: App[Any], *adds: Callable[[], Any]) -> list[str]:
        def play() -> None:
            for add in adds:
                add()
            app.close_sync()

        await asyncio.to_thread(play)
        return self.sent()


@pytest.fixture
def recorder(server: Server, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The clock stands still: jobs say when they were added."""
    if not isinstance(server, Server):
        pytest.skip("the tap is for servers of this machine")
    monkeypatch.setattr(time, "time_ns", lambda: T0_MS * 1_000_000)
    monkeypatch.setattr(time, "time", lambda: T0_MS / 1000)
    recorder = Recorder(server, queue_name)
    # The scripts are known to the server from here on, so that no recording has them.
    with sync.Queue(queue_name, redis_url=server.url) as queue:
        queue.add("warm", 1)
        queue.add("warm", 1, delay=HOUR, job_id="warm", unique_for=5)
        queue.add_bulk([{"name": "warm", "data": 1, "delay": HOUR}])
    yield recorder
    recorder.close()


def tasks_of(app: App[Any]) -> tuple[Any, Any, Any]:
    @app.task
    async def welcome(to: str, kind: str = "short", *, copies: int = 1) -> None: ...

    @app.task
    def ship(order: UUID, by: date | None = None, price: Decimal = Decimal(0)) -> Decimal:
        return price

    @app.task
    def raw(data: Any, /) -> None: ...

    return welcome, ship, raw


async def test_a_call_is_sent_as_the_queue_would_send_it(recorder: Recorder) -> None:
    app = App(recorder.queue, redis_url=recorder.url)
    welcome, ship, raw = tasks_of(app)
    day = date(2026, 11, 18)
    theirs = await recorder.by_queue(
        lambda q: q.add("welcome", {"to": "a@b"}),
        lambda q: q.add("welcome", {"to": "a@b", "kind": "long", "copies": 2}),
        lambda q: q.add("ship", {"order": str(IDS[1])}),
        lambda q: q.add("ship", {"order": str(IDS[2]), "by": "2026-11-18", "price": "1.50"}),
        lambda q: q.add("raw", [1, {"b": b"\xff"}]),
        lambda q: q.add("raw", None),
    )
    ours = await recorder.by_app(
        app,
        lambda: welcome.enqueue("a@b"),
        lambda: welcome.enqueue(copies=2, to="a@b", kind="long"),
        lambda: ship.enqueue(IDS[1]),
        lambda: ship.bind(IDS[2], day, Decimal("1.50")).enqueue(),
        lambda: raw.enqueue([1, {"b": b"\xff"}]),
        lambda: raw.enqueue(None),
    )
    assert ours == theirs
    assert any("to" in line for line in ours)
    theirs = await recorder.by_sync_queue(
        lambda q: q.add("welcome", {"to": "a@b"}),
        lambda q: q.add("ship", {"order": str(IDS[2]), "price": "1.50"}),
    )
    ours = await recorder.by_app_sync(
        app,
        lambda: welcome.enqueue_sync("a@b"),
        lambda: ship.bind(IDS[2], price=Decimal("1.50")).enqueue_sync(),
    )
    assert ours == theirs


async def test_options_are_sent_as_the_queue_would_send_them(recorder: Recorder) -> None:
    app = App(recorder.queue, redis_url=recorder.url)
    welcome, _, _ = tasks_of(app)
    data = {"to": "a@b"}
    backoff = BackoffSpec.exponential(100, max_ms=5000)
    theirs = await recorder.by_queue(
        lambda q: q.add("welcome", data, delay=HOUR),
        lambda q: q.add("welcome", data, delay_ms=MOMENT),
        lambda q: q.add("welcome", data, attempts=7, backoff=backoff),
        lambda q: q.add("welcome", data, job_id="own"),
        lambda q: q.add("welcome", data, job_id="own-2", unique_for=60.0, delay=HOUR),
    )
    ours = await recorder.by_app(
        app,
        lambda: welcome.with_options(delay=3600).enqueue("a@b"),
        lambda: welcome.with_options(at=MOMENT).enqueue("a@b"),
        lambda: welcome.with_options(attempts=7, backoff=backoff).enqueue("a@b"),
        lambda: welcome.with_options(job_id="own").enqueue("a@b"),
        lambda: welcome.with_options(job_id="own-2", unique_for=60, delay=HOUR).enqueue("a@b"),
    )
    assert ours == theirs


async def test_many_calls_are_sent_as_one_bulk(recorder: Recorder) -> None:
    app = App(recorder.queue, redis_url=recorder.url)
    welcome, ship, raw = tasks_of(app)
    rows: list[dict[str, Any]] = [{"name": "welcome", "data": {"to": f"{i}"}} for i in range(300)]
    mixed: list[dict[str, Any]] = [
        {"name": "welcome", "data": {"to": "a"}},
        {"name": "ship", "data": {"order": str(IDS[1])}},
        {"name": "welcome", "data": {"to": "b"}, "delay": HOUR},
        {"name": "raw", "data": 5, "attempts": 3},
        {"name": "raw", "data": {}, "job_id": "own"},
    ]
    ships: list[dict[str, Any]] = [{"name": "ship", "data": {"order": str(one)}} for one in IDS]

    def calls() -> list[Any]:
        return [
            welcome.bind("a"),
            ship.bind(IDS[1]),
            welcome.with_options(delay=HOUR).bind("b"),
            raw.with_options(attempts=3).bind(5),
            raw.with_options(job_id="own").bind({}),
        ]

    theirs = await recorder.by_queue(
        lambda q: q.add_bulk(rows),
        lambda q: q.add_bulk(rows[:1]),
        lambda q: q.add_bulk([]),
        lambda q: q.add_bulk(mixed),
        lambda q: q.add_bulk(ships),
    )
    ours = await recorder.by_app(
        app,
        lambda: app.enqueue_many(welcome.bind(f"{i}") for i in range(300)),
        lambda: app.enqueue_many([welcome.bind("0")]),
        lambda: app.enqueue_many([]),
        lambda: app.enqueue_many(calls()),
        lambda: app.enqueue_many(map(ship.bind, IDS)),
    )
    assert ours == theirs
    theirs = await recorder.by_sync_queue(
        lambda q: q.add_bulk(rows), lambda q: q.add_bulk(mixed[:4])
    )
    ours = await recorder.by_app_sync(
        app,
        lambda: app.enqueue_many_sync(welcome.bind(f"{i}") for i in range(300)),
        lambda: app.enqueue_many_sync(calls()[:4]),
    )
    assert ours == theirs


async def test_jobs_come_back_in_the_order_of_their_calls(app: App[None], queue_name: str) -> None:
    welcome, ship, raw = tasks_of(app)

    @app.task(queue=f"{queue_name}-b", unique_for=60)
    def other(n: int) -> int:
        return n

    calls = [welcome.bind("a"), other.bind(1), ship.bind(IDS[0]), other.bind(2), raw.bind(3)]
    jobs = await app.enqueue_many(calls)
    assert [job.name for job in jobs] == [call.task.name for call in calls]
    assert [job.data for job in jobs] == [call.data for call in calls]
    assert (await app.queue().counts()).waiting == 3
    assert (await app.queue(f"{queue_name}-b").counts()).waiting == 2


async def test_one_bad_call_and_nothing_is_sent(app: App[None]) -> None:
    welcome, _, raw = tasks_of(app)
    with pytest.raises(TypeError, match=r"calls\[1\] must be a call, made by task\.bind"):
        await app.enqueue_many([welcome.bind("a"), welcome])
    with pytest.raises(TypeError, match=r"jobs\[1\]: data is a set"):
        await app.enqueue_many([raw.bind(1), raw.bind({1, 2})])
    with pytest.raises(chasqui.PayloadTooLargeError, match=r"jobs\[0\]"):
        await app.enqueue_many([raw.bind(b"x" * (1 << 29))])
    assert (await app.queue().counts()).waiting == 0
