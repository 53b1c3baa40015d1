"""Handlers and callers that do what they should not: what would happen without protection."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chasqui import Job, Worker, sync
from chasqui._core.entry import Entry
from chasqui.consuming.dispatcher import Dispatcher
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.queue import Queue
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, Request
from tests.chaos.cancels import echo
from tests.consuming.conftest import Redis, Running, until
from tests.ledger import Census, audit
from tests.proxy import Proxy
from tests.servers import Server

Start = Callable[..., Running]
FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

# ── They raise ──────────────────────────────────────────────────────────────────────────────────


ERRORS = pytest.mark.parametrize(
    "error",
    [SystemExit(7), KeyboardInterrupt(), asyncio.CancelledError(), BaseException("odd")],
    ids=repr,
)


async def raise_in_a_run(server: Server, keys: Keys, error: BaseException) -> dict[str, set[int]]:
    """A handler raises, and the worker is closed; what is wrong then."""
    closing = []

    async def handler(job: Job) -> None:
        closing.append(asyncio.ensure_future(worker.close()))
        raise error

    worker = Worker(keys.queue, handler, redis_url=server.url, delayed_enabled=False)
    async with Queue(keys.queue, redis_url=server.url) as queue:
        await queue.add("n", {"n": 0}, backoff=60_000)
    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        await worker.run()
    await asyncio.gather(*closing)
    return audit([0], [], Census.take(server.url, keys.queue)).faults


@ERRORS
@pytest.mark.fault(48)
async def test_a_job_whose_handler_raised_is_not_done(
    server: Server, keys: Keys, error: BaseException
) -> None:
    assert await raise_in_a_run(server, keys, error) == {}


@ERRORS
@pytest.mark.fault(48, control=True)
async def test_a_failed_run_that_passes_for_a_good_one_is_caught(
    server: Server, keys: Keys, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgive(self: Dispatcher, entry: Entry, error: BaseException, started_ns: int) -> bool:
        self._returned(entry, entry.job_id, None, started_ns)
        return True

    monkeypatch.setattr(Dispatcher, "_failed", forgive)
    assert await raise_in_a_run(server, keys, error) == {"lost": {0}}


# ── They never return ───────────────────────────────────────────────────────────────────────────


async def stuck(
    queue: Queue, start: Start, redis: Redis, keys: Keys, **options: Any
) -> tuple[Running, bool]:
    """A worker with one slot, in which a job never ends; whether the next one runs all the same."""
    ran = asyncio.Event()

    async def handler(job: Job) -> None:
        if job.name == "never":
            await asyncio.get_running_loop().create_future()
        ran.set()

    running = start(handler, concurrency=1, claim_min_idle_ms=300, max_attempts=1, **options)
    await queue.add("never", None)
    await queue.add("next", None)
    idle_ms = [0]

    async def is_over() -> bool:
        """The next one ran, or the lease of the first was renewed several times."""
        for _, _, idle, _ in await redis("XPENDING", keys.stream, DEFAULT_GROUP, "-", "+", 1):
            idle_ms.append(idle)
        renewals = sum(b < a for a, b in itertools.pairwise(idle_ms))
        return ran.is_set() or renewals >= 5

    async def has_group() -> bool:
        return bool(await redis("EXISTS", keys.stream) and await redis("XLEN", keys.stream))

    await until(has_group, "jobs are there")
    await until(lambda: _quietly(is_over), "one or the other")
    return running, ran.is_set()


async def _quietly(fact: Callable[[], Any]) -> bool:
    try:
        return bool(await fact())
    except Exception as error:
        if "NOGROUP" not in str(error):
            raise
        return False


@pytest.mark.fault(49)
async def test_a_time_limit_frees_the_slot(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    _, has_run = await stuck(queue, start, redis, keys, timeout_ms=100)
    assert has_run


@pytest.mark.fault(49, control=True)
async def test_without_a_time_limit_the_slot_is_taken(
    queue: Queue, start: Start, redis: Redis, keys: Keys
) -> None:
    running, has_run = await stuck(queue, start, redis, keys)
    assert not has_run
    running.worker.stop_now()


# ── They fork ───────────────────────────────────────────────────────────────────────────────────


FORKED = 8


class Forking:
    """A worker whose handlers fork, and a queue that parent and children use alike."""

    def __init__(
        self,
        server: Server,
        queue_name: str,
        make_proxy: Callable[[str], Proxy],
        start_at: Callable[..., Running],
    ) -> None:
        self.of_worker, self.of_queue = make_proxy(server.url), make_proxy(server.url)
        self.queue = sync.Queue(queue_name, redis_url=self.of_queue.url)
        self.start_at = start_at

    async def play(self) -> None:
        codes: list[int] = []

        async def handler(job: Job) -> None:
            if job.name != "fork":
                return
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    self.queue.add("child", None)
                    code = 0
                finally:
                    os._exit(code)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            codes.append(os.waitstatus_to_exitcode(status))

        async def all_ended() -> bool:
            return len(codes) == FORKED

        running = self.start_at(self.of_worker.url, handler, concurrency=1)
        self.queue.add_bulk([{"name": "fork", "data": None}] * FORKED)
        await until(all_ended, "all children have ended")
        assert codes == [0] * FORKED
        assert self.of_queue.accepted == 1 + FORKED, "a child was on its parent's link"
        await running.completed(2 * FORKED)
        links = self.of_worker.accepted
        self.queue.add("last", None)
        await running.completed(2 * FORKED + 1)
        assert self.of_worker.accepted == links, "no link of the worker was lost"
        assert self.of_queue.accepted == 1 + FORKED, "nor that of the queue"


@pytest.fixture
def forking(
    server: Server,
    queue_name: str,
    make_proxy: Callable[[str], Proxy],
    start_at: Callable[..., Running],
) -> Iterator[Forking]:
    forking = Forking(server, queue_name, make_proxy, start_at)
    yield forking
    forking.queue.close()


@FORKS
@pytest.mark.fault(51)
async def test_a_handler_that_forks_leaves_the_links_alone(
    forking: Forking, caplog: pytest.LogCaptureFixture
) -> None:
    """The children add jobs with what they got from their parent, on links of their own."""
    await forking.play()
    assert "lost the server" not in caplog.text  # which is said of one that brought nonsense


@FORKS
@pytest.mark.fault(51, control=True)
async def test_a_child_that_takes_itself_for_its_parent_is_caught(
    forking: Forking, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent)
    with pytest.raises(AssertionError, match="a child was on its parent's link"):
        await forking.play()


@FORKS
async def test_a_reply_to_what_a_child_wrote_ends_the_link(
    server: Server,
    connect: Callable[..., Connection],
    make_proxy: Callable[[str], Proxy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = make_proxy(server.url)
    connection = connect(proxy.url)
    await connection.execute("PING", effect=Effect.READ)
    assert connection._flow.link is not None
    link = connection._flow.link._transport.get_extra_info("socket").fileno()
    child = os.fork()
    if child == 0:
        os.write(link, b"*1\r\n$4\r\nPING\r\n")
        os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.open_links == 0)
    assert "a reply that nobody asked for" in caplog.text


# ── They cancel ─────────────────────────────────────────────────────────────────────────────────


async def cancel_and_call(connection: Connection, proxy: Proxy) -> bytes:
    """What a call is answered whose predecessor was cancelled on its way."""
    await connection.connect()
    assert connection._flow.link is not None
    proxy.stall()
    cancelled = connection.submit(echo("cancelled"))
    while not connection._flow.link.inflight:  # noqa: ASYNC110
        await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    following = connection.submit(echo("following"))
    proxy.resume()
    answer: bytes = await following
    return answer


@pytest.mark.fault(52)
async def test_a_call_behind_a_cancelled_one_gets_its_own_reply(
    server: Server, connect: Callable[..., Connection], make_proxy: Callable[[str], Proxy]
) -> None:
    proxy = make_proxy(server.url)
    assert await cancel_and_call(connect(proxy.url), proxy) == b"following"


@pytest.mark.fault(52, control=True)
async def test_a_reply_that_is_not_waited_for_goes_to_the_next_call(
    server: Server,
    connect: Callable[..., Connection],
    make_proxy: Callable[[str], Proxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = Connection.submit

    def forgetful(self: Connection, request: Request) -> asyncio.Future[Any]:
        def forget(future: asyncio.Future[Any]) -> None:
            link = self._flow.link
            if future.cancelled() and link is not None:
                link.inflight.remove(request)

        future = submit(self, request)
        future.add_done_callback(forget)
        return future

    monkeypatch.setattr(Connection, "submit", forgetful)
    proxy = make_proxy(server.url)
    assert await cancel_and_call(connect(proxy.url), proxy) == b"cancelled"
