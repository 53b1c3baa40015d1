"""Servers that refuse everything for a while: no room, still loading, no entry, another server."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from chasqui import Job, Queue, Worker, sync
from chasqui.errors import (
    AuthenticationError,
    OutcomeUnknownError,
    ServerError,
    UnreachableError,
)
from chasqui.transport import embedded
from chasqui.transport.connection import Connection
from chasqui.transport.handshake import Handshake
from chasqui.transport.link import Link, open_link
from chasqui.transport.recovery import DialPacing
from chasqui.transport.request import Effect, commands
from chasqui.transport.server import Recovery
from tests.consuming.conftest import Running, until
from tests.crash.conftest import Fleet, eventually
from tests.faults.disk import DiskServer, build_shim
from tests.ledger import Census
from tests.proxy import Proxy
from tests.servers import KINDS, Server

CANARY = "Kanari-91be"
#: What a caller gets while the door is shut; the second if it was shut before he had his answer.
REFUSED = (AuthenticationError, OutcomeUnknownError)

# ── The disk is full ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=KINDS)
def disk_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskServer]:
    request.node.user_properties.append(("server", request.param))
    with DiskServer(request.param, build_shim(tmp_path), appendfsync="everysec") as server:
        yield server


def add(fleet: Fleet, name: str = "quick") -> str:
    """Add one job more; whether it was "added" or "refused", as the books have it."""
    n = fleet.ledger.count("added") + fleet.ledger.count("refused")
    try:
        fleet.queue.add(name, {"n": n})
    except ServerError as error:
        if error.code != "MISCONF":
            raise
        outcome = "refused"
    else:
        fleet.added.append(n)
        outcome = "added"
    fleet.ledger.write(outcome, n, "producer")
    return outcome


def fill(disk_server: DiskServer, fleet: Fleet, target: str = "tests.crash.workers:make") -> None:
    """The disk is full while jobs are added and while one ends; then there is room again."""
    worker = fleet.start("worker", target=target)
    add(fleet, "hold")
    eventually(lambda: add(fleet) and len(fleet.added) > 20, "jobs are added")
    eventually(lambda: 0 in {fact.n for fact in fleet.ledger.read("start")}, "one is held")
    disk_server.fill()

    def is_full() -> bool:
        add(fleet)
        return bool(fleet.client.info("persistence")["aof_last_write_status"] == "err")

    eventually(is_full, "the server can write nothing")
    assert add(fleet) == "refused"
    worker.open_gate()
    eventually(lambda: "acks are refused" in worker.log, "the end of a job meets the full disk")
    disk_server.make_room()
    eventually(lambda: add(fleet) == "added", "adds are taken again")
    fleet.ended(len(fleet.added))
    eventually(lambda: fleet.census().is_empty, "all is acknowledged")
    assert worker.process.poll() is None
    found = fleet.audit()
    assert found.faults == {}
    assert found.extra == {}, "some ran twice"


@pytest.mark.fault(35)
def test_a_full_disk_refuses_adds_and_keeps_what_it_took(
    disk_server: DiskServer, make_fleet: Callable[[str], Fleet]
) -> None:
    fill(disk_server, make_fleet(disk_server.url))


@pytest.mark.fault(35)
async def test_newcomers_find_a_server_whose_disk_is_full_and_wait_for_room(
    disk_server: DiskServer, start_at: Callable[..., Running], queue_name: str
) -> None:
    await find_it_full(disk_server.url, disk_server.directory, start_at, queue_name)


@pytest.mark.fault(35)
async def test_newcomers_find_an_embedded_server_whose_disk_is_full(
    tmp_path: Path,
    start_at: Callable[..., Running],
    queue_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"embedded://{tmp_path}/data"
    monkeypatch.setenv("LD_PRELOAD", str(build_shim(tmp_path)))
    monkeypatch.setenv("DISK_FOLDER", str(tmp_path))
    with embedded.start(tmp_path / "data"):
        monkeypatch.undo()
        await find_it_full(url, tmp_path, start_at, queue_name)


async def find_it_full(
    url: str, folder: Path, start_at: Callable[..., Running], queue_name: str
) -> None:
    """A worker and queues come while a server refuses all for lack of room, even PING."""
    code = ""

    async def is_refused() -> bool:
        nonlocal code
        async with Queue(queue_name, redis_url=url) as newcomer:
            try:
                await newcomer.add("n", None)
            except ServerError as error:
                code = error.code
        return bool(code)

    def add_blocking() -> None:
        with sync.Queue(queue_name, redis_url=url) as newcomer:
            newcomer.add("n", None)

    (folder / "full").touch()
    try:
        await until(is_refused, "an add is refused")
        assert code == "MISCONF"
        with pytest.raises(ServerError, match="MISCONF"):
            await asyncio.to_thread(add_blocking)
        running = start_at(url, fine)

        async def is_there() -> bool:
            health = running.worker.health()
            return health is not None and health.is_connected

        await running.fact(until(is_there, "the worker has found it"))
    finally:
        (folder / "full").unlink()
    await running.completed(1)  # what it took before it knew


async def fine(job: Job) -> None:
    pass


@pytest.mark.fault(35, control=True)
def test_without_its_error_a_refused_add_seems_added(
    disk_server: DiskServer, make_fleet: Callable[[str], Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chasqui.transport.flow.exception_for", lambda error: error)  # an answer
    with pytest.raises(AssertionError, match="'added' == 'refused'"):
        fill(disk_server, make_fleet(disk_server.url))


@pytest.mark.fault(35, control=True)
def test_without_another_try_a_refused_ack_is_a_second_run(
    disk_server: DiskServer, make_fleet: Callable[[str], Fleet]
) -> None:
    with pytest.raises(AssertionError, match="some ran twice"):
        fill(disk_server, make_fleet(disk_server.url), "tests.faults.workers:resigned")


# ── Still loading ───────────────────────────────────────────────────────────────────────────────


#: What lets a test ask a server to load everything again; to 6.2 anybody may.
MAY_RELOAD = {kind: {"enable_debug_command": "yes"} for kind in KINDS} | {"redis-6.2": {}}


async def work_while_loading(server: Server, queue_name: str) -> bool:
    """Whether an add and a worker that meet a loading server do their work nevertheless.

    A server that loads answers every 2 MB.
    """
    fill = "for i = 1, 100 do redis.call('set', i, string.rep('x', 200000)) end"
    with redis_py.Redis.from_url(server.url) as client:
        client.config_set("rdbcompression", "no")
        client.eval(fill, 0)
        client.config_set("key-load-delay", "20000")
        async with Queue(queue_name, redis_url=server.url) as queue:
            await queue.is_paused()
            reloading = asyncio.create_task(
                asyncio.to_thread(client.execute_command, "DEBUG", "RELOAD")
            )
            with redis_py.Redis.from_url(server.url) as other:
                await _until(lambda: bool(other.info("persistence")["loading"]))
            done = asyncio.Event()

            async def handler(job: Any) -> None:
                done.set()

            async with Worker(queue_name, handler, redis_url=server.url) as worker:
                running = asyncio.ensure_future(worker.run())
                try:
                    await queue.add("n", {"n": 0})
                    await asyncio.wait_for(done.wait(), 20)
                    return True
                except ServerError as error:
                    if error.code != "LOADING":
                        raise
                    return False
                finally:
                    await reloading
                    await worker.close()
                    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.fault(36)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_loading_server_is_waited_for(
    private_server: Callable[..., Server], queue_name: str, kind: str
) -> None:
    assert await work_while_loading(private_server(kind, **MAY_RELOAD[kind]), queue_name)


@pytest.mark.fault(36, control=True)
@pytest.mark.parametrize("kind", KINDS)
async def test_without_waiting_a_loading_server_is_an_error(
    private_server: Callable[..., Server],
    queue_name: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "chasqui.transport.flow.recovery_for", lambda request, error: Recovery.RAISE
    )
    assert not await work_while_loading(private_server(kind, **MAY_RELOAD[kind]), queue_name)


# ── Refused at the door ─────────────────────────────────────────────────────────────────────────


class Rotated:
    """A worker and a queue at a server whose password changes under them."""

    def __init__(self, server: Server, proxy: Proxy, queue_name: str) -> None:
        self.proxy = proxy
        #: What whoever is asked says, and has said.
        self.provided = f"{CANARY}-1"
        self.asked: list[str] = []
        self._admin = redis_py.Redis.from_url(server.url)
        options: dict[str, Any] = {"redis_url": proxy.url, "credential_provider": self._provide}
        self.queue = Queue(queue_name, **options)
        self.done = asyncio.Event()
        self.worker = Worker(queue_name, self._handle, read_block_ms=200, **options)

    async def _provide(self, host: str | None) -> tuple[str, str]:
        self.asked.append(self.provided)
        return "app", self.provided

    async def _handle(self, job: Any) -> None:
        self.done.set()

    def set_password(self, password: str) -> None:
        """A new password; nobody who came in with the old one stays."""
        self._admin.execute_command(
            *("ACL", "SETUSER", "app", "reset", "on", f">{password}", "~*", "&*", "+@all")
        )
        self._admin.client_kill_filter(user="app")

    async def works(self) -> bool:
        self.done.clear()
        await self.queue.add("n", None)
        await asyncio.wait_for(self.done.wait(), 20)
        return True

    async def works_again(self) -> bool:
        """Within a few tries: a dial may be on its way that knows nothing yet."""
        for _ in range(5):
            with contextlib.suppress(REFUSED):
                return await self.works()
        return False

    def close(self) -> None:
        self._admin.close()


@pytest.fixture(params=KINDS)
def rotated(
    request: pytest.FixtureRequest,
    private_server: Callable[..., Server],
    make_proxy: Callable[[str], Proxy],
    queue_name: str,
) -> Iterator[Rotated]:
    request.node.user_properties.append(("server", request.param))
    server = private_server(request.param)
    rotated = Rotated(server, make_proxy(server.url), queue_name)
    yield rotated
    rotated.close()


async def rotate(rotated: Rotated) -> Exception:
    """The password changes, and whoever provides it learns of that a little later; what a caller
    got in between."""
    rotated.set_password(rotated.provided)
    async with rotated.queue, rotated.worker:
        running = asyncio.ensure_future(rotated.worker.run())
        try:
            assert await rotated.works()
            before = rotated.proxy.accepted
            rotated.set_password(f"{CANARY}-2")
            with pytest.raises(REFUSED) as refused:
                await rotated.works()
            rotated.provided = f"{CANARY}-2"
            assert await rotated.works_again(), "the new password is not taken"
            assert rotated.proxy.accepted - before < 60, "dialled in a hot loop"
            await rotated.worker.close()
            await running
        finally:
            running.cancel()  # it would wait for a server that does not let it in
    return refused.value


@pytest.mark.fault(37)
async def test_a_new_password_is_asked_for(
    rotated: Rotated, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    refused = await rotate(rotated)
    assert set(rotated.asked) == {f"{CANARY}-1", f"{CANARY}-2"}
    assert CANARY not in f"{caplog.text} {refused!r}"


@pytest.mark.fault(37, control=True)
async def test_a_password_that_is_asked_for_once_is_refused_for_good(
    rotated: Rotated, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    async def open_with_kept(endpoint: Any, introduction: Any, provider: Any) -> Link:
        if not kept:
            kept.append(await provider(endpoint.host))
        return await open_link(endpoint.with_credentials(kept[0]), introduction, None)

    monkeypatch.setattr("chasqui.transport.dialler.open_link", open_with_kept)
    with pytest.raises(AssertionError, match="the new password is not taken"):
        await rotate(rotated)


async def knock(
    server_url: str, proxy: Proxy, connection: Connection, *, timeout_s: float = 1.0
) -> None:
    """A server lets nobody in for as long as a call with little time waits for it."""
    await connection.execute("PING", effect=Effect.READ)
    with redis_py.Redis.from_url(server_url) as admin:
        admin.config_set("maxclients", "1")
        before = proxy.accepted
        proxy.cut()
        patient = connection.submit(commands(("PING",), effect=Effect.READ))
        hasty = connection.submit(commands(("PING",), effect=Effect.READ, timeout_s=timeout_s))
        with pytest.raises(UnreachableError):
            await hasty
        dials = proxy.accepted - before
        assert not patient.done()
        admin.config_set("maxclients", "100")
        assert await patient == b"PONG"
    assert dials, "not dialled at all"
    assert dials <= 8, "dialled in a hot loop"


@pytest.mark.fault(37)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_with_too_many_clients_is_waited_for(
    private_server: Callable[..., Server],
    make_proxy: Callable[[str], Proxy],
    connect: Callable[..., Connection],
    kind: str,
) -> None:
    server = private_server(kind)
    proxy = make_proxy(server.url)
    await knock(server.url, proxy, connect(proxy.url))


@pytest.mark.fault(37, control=True)
@pytest.mark.parametrize("kind", KINDS)
async def test_without_a_pause_between_dials_they_are_a_storm(
    private_server: Callable[..., Server],
    make_proxy: Callable[[str], Proxy],
    connect: Callable[..., Connection],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DialPacing, "wait_s", lambda self, now_s: 0.0)
    server = private_server(kind)
    proxy = make_proxy(server.url)
    with pytest.raises(AssertionError, match="in a hot loop"):
        await knock(server.url, proxy, connect(proxy.url), timeout_s=4.0)


# ── Another server on the same port ─────────────────────────────────────────────────────────────


async def work_on_each(
    servers: list[Server], proxy: Proxy, queue_name: str, start_at: Callable[..., Running]
) -> list[int]:
    """How many of ten jobs are left on each server, as one after the other takes the port."""
    ran: list[int] = []

    async def handler(job: Any) -> None:
        ran.append(job.data["n"])

    running = start_at(proxy.url, handler, read_block_ms=100, claim_min_idle_ms=60_000)
    left = []
    async with Queue(queue_name, redis_url=proxy.url) as queue:
        for i, server in enumerate(servers):
            proxy.point_to(server.url)
            numbers = range(10 * i, 10 * i + 10)
            await queue.add_bulk([{"name": "n", "data": {"n": n}} for n in numbers])
            await running.fact(_until(lambda i=i: len(ran) == 10 * i + 10))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    _until(lambda s=server: not Census.take(s.url, queue_name).stream), 3
                )
            left.append(len(Census.take(server.url, queue_name).stream))
    assert sorted(ran) == list(range(10 * len(servers)))
    return left


async def _until(fact: Callable[[], bool]) -> None:
    while not fact():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.fault(39)
async def test_what_a_server_can_do_is_asked_on_each_link(
    redis_86: Server,
    redis_62: Server,
    valkey_9: Server,
    make_proxy: Callable[[str], Proxy],
    queue_name: str,
    start_at: Callable[..., Running],
) -> None:
    servers = [redis_86, redis_62, valkey_9, redis_86]
    proxy = make_proxy(redis_86.url)
    assert await work_on_each(servers, proxy, queue_name, start_at) == [0, 0, 0, 0]


@pytest.mark.fault(39, control=True)
async def test_what_is_believed_of_the_next_server_is_wrong(
    redis_86: Server,
    redis_62: Server,
    make_proxy: Callable[[str], Proxy],
    queue_name: str,
    start_at: Callable[..., Running],
    connect: Callable[..., Connection],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = await connect(redis_86.url, is_reader=True).connect()
    talk = Handshake.talk

    def believe(self: Handshake, endpoint: Any) -> Any:
        yield from talk(self, endpoint)
        return profile

    monkeypatch.setattr(Handshake, "talk", believe)
    # Reads that take nothing over are the same everywhere: ten jobs are done before they end.
    monkeypatch.setattr("chasqui.consuming.takeover_pause.MAX_PAUSE_S", 0.0)
    proxy = make_proxy(redis_86.url)
    working = asyncio.create_task(work_on_each([redis_86, redis_62], proxy, queue_name, start_at))
    refused = asyncio.create_task(_until(lambda: "cannot be read: ERR syntax error" in caplog.text))
    try:
        await asyncio.wait({working, refused}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert not working.done()
        assert refused.done()
    finally:
        for task in (working, refused):
            task.cancel()
        await asyncio.gather(working, refused, return_exceptions=True)
