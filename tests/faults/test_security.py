"""What an attacker may try: URLs that carry commands, names that carry code, logs that tell."""

import asyncio
import contextlib
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import redis as redis_py

import chasqui
from chasqui import ChasquiError, Queue, Worker, scripts, sync
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, Script
from tests.consuming.conftest import Redis, Running, until
from tests.faults.fake import FakeServer
from tests.proxy import Proxy
from tests.servers import Server

CANARY = "Kanari-4c1d"
PACKAGE = Path(chasqui.__file__).parent
SCHEMES = ["http", "https", "gopher", "ftp", "file", "dict", "javascript", "redis+http", "tcp", ""]

# ── URLs ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_servers_of_ours_are_dialled(scheme: str) -> None:
    with pytest.raises(ValueError, match="must start with") as refused:
        Endpoint.parse(f"{scheme}://user:{CANARY}@127.0.0.1:6379/0")
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize("char", ["\r\n", "\n", "\r", "\0", "\t", " ", "\x7f"], ids=ascii)
@pytest.mark.parametrize(
    "url",
    [
        "redis://{}@127.0.0.1",
        "redis://user:{}@127.0.0.1",
        "redis://127.0.0.1{}",
        "redis://127.0.0.1:6379{}",
        "redis://127.0.0.1/0{}",
        "rediss://127.0.0.1?ssl_ca_certs={}",
        "redis+sentinel://127.0.0.1/service{}",
        "unix:///socket{}",
    ],
)
def test_no_part_of_a_url_holds_control_characters(url: str, char: str) -> None:
    with pytest.raises(ValueError, match="redis_url") as refused:
        Endpoint.parse(url.format(f"{CANARY}{char}FLUSHALL"))
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:0",
        "redis://127.0.0.1:65536",
        "redis://127.0.0.1:6379:6379",
        "redis://::1",
        "redis://[::1",
        "redis://a,b",
        "redis://127.0.0.1/x",
        "redis://127.0.0.1/0/1",
        "redis://127.0.0.1/-1",
        "redis://127.0.0.1?decode_responses=1",
        "rediss://127.0.0.1?ssl_cert_reqs=none",
    ],
)
def test_a_url_of_which_a_part_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="redis_url"):
        Endpoint.parse(url)


def test_what_is_quoted_in_a_url_stays_one_word() -> None:
    """A password may hold any bytes; none of them is a command."""
    seen: list[list[bytes]] = []

    def note(words: list[bytes]) -> None:
        seen.append(words)

    injected = "x%0d%0aFLUSHALL%0d%0a*1%0d%0a$8%0d%0aFLUSHALL%0d%0a"
    with FakeServer(note) as server:
        url = server.url.replace("redis://", f"redis://{injected}:{injected}@")
        with sync.Queue("q", redis_url=url) as queue, contextlib.suppress(ChasquiError):
            queue.is_paused()
    names = [words[0] for words in seen]
    assert names[0] == b"HELLO"
    assert b"EXISTS" in names, "it came so far as to do what it was asked to"
    assert {*names} <= {b"HELLO", b"CLIENT", b"COMMAND", b"EXISTS"}


# ── Names and data ──────────────────────────────────────────────────────────────────────────────

#: Tries to end the command it is in, the script it goes to, or the key it is part of.
HOSTILE = [
    "n\r\n*1\r\n$8\r\nFLUSHALL\r\n",
    "') redis.call('FLUSHALL') --",
    "]]; redis.call('FLUSHALL')",
    "*",
    "../../etc/passwd",
    "os.system",
    "imported_by_name:run",
    "imported_by_name",
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:12]))
async def test_names_and_data_are_only_data(
    server: Server,
    queue: Queue,
    start: Callable[..., Running],
    redis: Redis,
    keys: Keys,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They go through every script: add, delay, retry, burial, replay."""
    await redis("SET", keys.result("witness"), "here")
    # One that can be imported: of one that cannot, nothing would be left to see.
    (tmp_path / "imported_by_name.py").write_text("def run(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[Any] = []

    async def handler(job: Any) -> None:
        seen.append((job.name, job.data))
        raise ValueError(name)

    running = start({"known": handler}, default=handler, max_attempts=2)
    with contextlib.suppress(ValueError):  # some are refused as names, none as data
        await queue.add(name, name, attempts=2, backoff=1)
    await queue.add("known", {name: name}, attempts=2, backoff=1)
    await queue.add("known", name, delay_ms=1, attempts=1)
    await running.buried(2)

    async def all_dead() -> bool:
        return bool(await redis("XLEN", keys.dlq) >= 2 and not await redis("XLEN", keys.stream))

    await until(all_dead, "all are buried")
    assert await queue.replay_dlq(10) >= 2
    assert ("known", {name: name}) in seen
    assert await redis("GET", keys.result("witness")) == b"here"
    assert "imported_by_name" not in sys.modules


@pytest.mark.parametrize("job_id", ["y}:stream", "{x}", "a\r\nb", "a\0b", "x" * 257, "\ud800"])
async def test_ids_that_could_be_taken_for_keys_are_refused(queue: Queue, job_id: str) -> None:
    with pytest.raises(ValueError, match="job_id"):
        await queue.add("n", None, job_id=job_id)


# ── Secrets ─────────────────────────────────────────────────────────────────────────────────────


async def test_nothing_shows_the_password(
    private_server: Callable[..., Server],
    make_proxy: Callable[[str], Proxy],
    queue_name: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Logs of every level, errors, reprs, task and thread names, and what is kept in Redis."""
    caplog.set_level(logging.DEBUG)
    server = private_server("redis-8.6", requirepass=CANARY)
    proxy = make_proxy(server.url)
    url = proxy.url.replace("redis://", f"redis://:{CANARY}@")
    told: list[str] = []

    async def handler(job: Any) -> None:
        told.append(repr(job))
        raise ValueError("as told")

    queue = Queue(queue_name, redis_url=url, request_timeout_s=2)
    worker = Worker(queue_name, handler, redis_url=url, max_attempts=1, shutdown_deadline_s=1)
    running = asyncio.ensure_future(worker.run())
    await queue.add("n", None)
    await asyncio.to_thread(proxy.wait_for, lambda: proxy.count("EVALSHA") > 0)
    with redis_py.Redis.from_url(server.url, password=CANARY) as client:
        keys = Keys(queue_name)

        async def is_buried() -> bool:
            return bool(client.xlen(keys.dlq))

        await until(is_buried, "the job is in the dead-letter queue")
        told.append(str(client.xrange(keys.dlq)))
        told.append(str(client.client_list()))
    with sync.Queue(queue_name, redis_url=url) as blocking:
        blocking.add("n", None)
        told.append(repr(blocking))
    told += [repr(queue), repr(worker), repr(worker.health()), repr(Endpoint.parse(url))]
    told += [str(task) for task in asyncio.all_tasks()]
    told += [thread.name for thread in threading.enumerate()]
    server.kill()
    proxy.cut()
    with pytest.raises(ChasquiError) as lost:
        await queue.add("n", None)
    told.append(repr(lost.value))
    with pytest.raises(ChasquiError) as refused:
        await Worker(queue_name, handler, redis_url=f"redis://:{CANARY}@127.0.0.1:1").run()
    told.append(repr(refused.value))
    await worker.close()
    await asyncio.gather(running, return_exceptions=True)
    await queue.close()
    printed = capfd.readouterr()
    everything = " ".join([*told, caplog.text, printed.out, printed.err])
    assert CANARY not in everything
    assert len(caplog.records) > 0


def shown(error: BaseException | None) -> str:
    """All that a tool sees which keeps the variables of our frames with an error."""
    seen: list[str] = []
    while error is not None:
        seen.append(repr(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                seen += [f"{frame.f_code.co_name}: {one!r}" for one in frame.f_locals.values()]
        error = error.__cause__ or error.__context__
    return "\n".join(seen)


@pytest.mark.parametrize("answer", [b"-WRONGPASS no", b"-ERR unknown command", b"-LOADING"])
async def test_nor_do_the_variables_of_a_traceback(
    connect: Callable[..., Connection],
    connect_blocking: Callable[..., BlockingConnection],
    answer: bytes,
) -> None:
    """Wherever the greeting fails."""

    def tell(words: list[bytes]) -> bytes | None:
        if words[0] == b"HELLO":
            return answer + b"\r\n"
        return b"-WRONGPASS no\r\n" if words[0] == b"AUTH" else None

    with FakeServer(tell) as server:
        url = server.url.replace("//", f"//user:{CANARY}@")
        connection = connect(url, request_timeout_s=0.3)
        with pytest.raises(ChasquiError) as refused:
            await connection.execute("PING", effect=Effect.READ)
        assert CANARY not in shown(refused.value)
        blocking = connect_blocking(url, request_timeout_s=0.3)
        with pytest.raises(ChasquiError) as refused:
            await asyncio.to_thread(blocking.execute, "PING", effect=Effect.READ)
        assert CANARY not in shown(refused.value)
    assert "execute" in shown(refused.value)


def test_the_search_for_the_password_would_find_it(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("chasqui").warning("no connection to %s", f"redis://:{CANARY}@h")
    assert CANARY in caplog.text


# ── Scripts ─────────────────────────────────────────────────────────────────────────────────────


def test_scripts_are_files_and_nothing_else() -> None:
    """No Lua is put together in Python, so that nothing of a user's gets into it."""
    package = Path(chasqui.__file__).parent
    folder = package / "scripts" / "lua"
    modules = [
        import_module(f"chasqui.scripts.{one.name}") for one in iter_modules(scripts.__path__)
    ]
    known = [
        one
        for module in (scripts, *modules)
        for one in vars(module).values()
        if isinstance(one, Script)
    ]
    assert known
    for script in known:
        own = (folder / f"{script.name}.lua").read_bytes()
        owned, envelope, flow = (
            (folder / f"{part}.lua").read_bytes() for part in ("owned", "envelope", "flow")
        )
        assert script.source in (own, *(part + own for part in (owned, envelope, owned + flow)))
    for path in package.rglob("*.py"):
        text = path.read_text()
        assert "redis.call(" not in text, path
        assert not re.search(r"Script\(\s*f?[\"']", text), path
