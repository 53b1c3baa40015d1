"""Signal handlers that raise in the middle of a blocking call: the exception is the caller's, and
nobody else is disturbed."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from chasqui.errors import OutcomeUnknownError
from chasqui.model.config import Endpoint
from chasqui.producing.durable import DurableRequest
from chasqui.producing.shared_wait import BlockingDurableConnection, _Line
from chasqui.transport.blocking import BlockingConnection
from tests.crash.load import Seed
from tests.fixtures import echo
from tests.proxy import WAIT_S, Fault, Proxy
from tests.servers import Server
from tests.transport.test_blocking_threads import Handler

Connect = Callable[..., BlockingConnection]
MakeProxy = Callable[[str], Proxy]

#: How many calls are interrupted; by hand it was a hundred thousand.
INTERRUPTS = 1500


@pytest.mark.parametrize("raised", ["RuntimeError", "TimeoutError", "KeyboardInterrupt"])
def test_no_moment_is_a_bad_one(server: Server, raised: str) -> None:
    """The lock is given back, and replies stay in step."""
    program = [sys.executable, "-m", "tests.transport.interrupting", server.url]
    ran = subprocess.run(
        [*program, raised, str(INTERRUPTS), str(Seed().seed)],
        capture_output=True,
        text=True,
        timeout=WAIT_S * 3,
    )
    assert ran.returncode == 0, ran.stderr


# ── What the caller gets ────────────────────────────────────────────────────────────────────────


def give_up() -> None:
    raise TimeoutError("of my own")


class Raising(Handler):
    """The same, and what the deed raises is raised where the thread is."""

    def _handle(self, *_: object) -> None:
        self._deed()


def test_a_timeout_of_the_caller_is_not_taken_for_the_servers(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    connection.connect()
    proxy.fail(Fault.SWALLOW, "ECHO")
    is_time = lambda: proxy.commands[-1] == b"ECHO"  # noqa: E731
    with Raising(is_time, give_up), pytest.raises(TimeoutError, match="of my own"):
        connection.call(echo("x"))
    assert connection.call(echo("y")) == b"y"


@pytest.fixture
def silent() -> Iterator[tuple[str, Callable[[], bool]]]:
    """The URL of a server that takes links and says nothing, and whether it has one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []
        thread = threading.Thread(target=lambda: taken.append(listener.accept()[0]))
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", lambda: bool(taken)
        thread.join()
        taken[0].close()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_nor_while_a_link_is_made_anew(
    connect_blocking: Connect, silent: tuple[str, Callable[[], bool]], scheme: str
) -> None:
    place, is_dialled = silent
    connection = connect_blocking(f"{scheme}://{place}")
    connection._state().dialler.pacing.was_connected = True
    with Raising(is_dialled, give_up), pytest.raises(TimeoutError, match="of my own"):
        connection.call(echo("x"))


def test_those_who_share_a_durable_wait_are_told_that_they_cannot_know(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = BlockingDurableConnection(Endpoint.parse(proxy.url), key=b"k")
    line = connection._lines[os.getpid()] = _Line()
    mine, others = (DurableRequest(echo(n), echo("mark"), "replica") for n in range(2))
    with contextlib.closing(connection), ThreadPoolExecutor(1) as pool:
        with line.lock:
            other = pool.submit(connection.call, others)
            while others not in line.next:
                pass
            # There is no replica: the server takes its time.
            is_time = lambda: proxy.count("WAIT") == 1  # noqa: E731
            with Raising(is_time, give_up), pytest.raises(TimeoutError, match="of my own"):
                connection.call(mine)
        with pytest.raises(OutcomeUnknownError, match="interrupted"):
            other.result()
        assert connection.call(echo("x")) == b"x"
