"""The blocking connection among threads, in forks, and where a signal handler interrupts it."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import pytest

from chasqui import sync
from chasqui.errors import ClosedError, UnreachableError
from chasqui.producing.shared_wait import BlockingDurableConnection
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.sockets import INBOX_BYTES
from tests.fixtures import echo
from tests.proxy import WAIT_S, Fault, Proxy
from tests.servers import Server

Connect = Callable[..., BlockingConnection]
MakeProxy = Callable[[str], Proxy]


# ── Threads ─────────────────────────────────────────────────────────────────────────────────────


def test_many_threads_get_their_own_replies(server: Server, connect_blocking: Connect) -> None:
    connection = connect_blocking(server.url)

    def work(thread: int) -> int:
        for i in range(200):
            assert connection.call(echo(f"{thread}-{i}")) == b"%d-%d" % (thread, i)
        return thread

    with ThreadPoolExecutor(16) as pool:
        assert sorted(pool.map(work, range(16))) == list(range(16))


def test_no_thread_and_no_event_loop_is_left(server: Server, connect_blocking: Connect) -> None:
    threads = threading.active_count()
    connect_blocking(server.url).call(echo("x"))
    assert threading.active_count() == threads


def test_close_ends_the_calls_of_other_threads(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy, queue_name: str
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    connection.connect()
    proxy.fail(Fault.SWALLOW, "ECHO")
    proxy.fail(Fault.SWALLOW, "INCR")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connection.call, echo("x"))
        proxy.wait_for(lambda: proxy.commands[-1] == b"ECHO")
        connection.close()
        with pytest.raises(ClosedError):
            waiting.result()
    connection.close()
    with pytest.raises(ClosedError):
        connection.call(echo("x"))
    proxy.wait_for(lambda: not proxy._links)
    gc.collect()  # an unclosed socket would warn, and warnings are errors


# ── Forks ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.fault(51)
def test_parent_and_children_each_have_a_link_of_their_own(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    connection.connect()
    children = []
    for child in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for i in range(100):
                    assert connection.call(echo(f"{child}-{i}")) == b"%d-%d" % (child, i)
                connection.close()
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    for i in range(100):
        assert connection.call(echo(i)) == b"%d" % i
    for pid in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert connection.call(echo("parent")) == b"parent"
    assert proxy.accepted == 5


@pytest.mark.fault(51)
def test_a_fork_in_the_middle_of_a_call_does_not_lock_the_child(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    connection.connect()
    proxy.stall()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connection.call, echo("parent"))
        state = connection._state()
        while not state.is_busy:
            pass
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                # The child's own link hangs in the same proxy; the lock must not.
                connection._request_timeout_s = 0.2
                connection.call(echo("child"))
            except UnreachableError as error:
                code = 0 if "earlier calls" not in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        proxy.resume()
        assert waiting.result() == b"parent"


class _Slow:
    """A size that takes its time to be told, in the process that asks first."""

    def __init__(self) -> None:
        self.asked, self.forked = threading.Event(), threading.Event()
        self._pid = os.getpid()

    def __index__(self) -> int:
        if os.getpid() == self._pid:
            self.asked.set()
            self.forked.wait(WAIT_S)
        return INBOX_BYTES


@pytest.mark.fault(51)
def test_a_fork_while_another_thread_dials_does_not_lock_the_child(
    server: Server, connect_blocking: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = _Slow()
    monkeypatch.setattr("chasqui.transport.sockets.INBOX_BYTES", slow)
    first, second = connect_blocking(server.url), connect_blocking(server.url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.call, echo("parent"))
        assert slow.asked.wait(WAIT_S)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # a lock that nobody gives back is waited for until then
            is_wrong = True
            try:
                is_wrong = second.call(echo("child")) != b"child"
            finally:
                os._exit(is_wrong)
        slow.forked.set()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert waiting.result() == b"parent"


def test_threads_that_use_it_first_after_a_fork(server: Server, connect_blocking: Connect) -> None:
    """Each of them forgets the states of parents: so many here that they meet while they do."""
    connection = connect_blocking(server.url)
    begin, interval_s = threading.Barrier(4), sys.getswitchinterval()

    def state(_: object) -> object:
        begin.wait(WAIT_S)
        return connection._state()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(20):
                connection._states.clear()
                connection._states.update(dict.fromkeys(range(-20_000, 0)))  # type: ignore[arg-type]
                states = pool.map(state, range(4))
                assert len(set(states)) == len(connection._states) == 1
    finally:
        sys.setswitchinterval(interval_s)
    assert connection.call(echo("x")) == b"x"


# ── Signal handlers ─────────────────────────────────────────────────────────────────────────────


class Handler:
    """Interrupts what this thread does, as soon as `is_time`, for a deed; what that raised."""

    def __init__(self, is_time: Callable[[], bool], deed: Callable[[], object]) -> None:
        self.raised: Exception | None = None
        self._deed = deed
        self._thread = threading.Thread(target=self._interrupt, args=(is_time,))

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._before)

    def _interrupt(self, is_time: Callable[[], bool]) -> None:
        while not is_time():
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _handle(self, *_: object) -> None:
        try:
            self._deed()
        except Exception as error:
            self.raised = error


def test_a_signal_handler_is_told_at_once_that_its_thread_is_in_a_call(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    connection.connect()
    proxy.stall()

    def deed() -> None:
        try:
            connection.call(echo("handler"))
        finally:
            proxy.resume()

    state = connection._state()
    with Handler(lambda: state.is_busy, deed) as handler:
        assert connection.call(echo("x")) == b"x"
    assert type(handler.raised) is RuntimeError
    assert "already" in str(handler.raised)
    assert connection.call(echo("y")) == b"y"


def test_a_signal_handler_closes_what_its_thread_waits_for(
    server: Server, connect_blocking: Connect, make_proxy: MakeProxy
) -> None:
    proxy = make_proxy(server.url)
    connection = connect_blocking(proxy.url)
    connection.connect()
    proxy.fail(Fault.SWALLOW, "ECHO")
    is_time = lambda: proxy.commands[-1] == b"ECHO"  # noqa: E731
    with Handler(is_time, connection.close) as handler, pytest.raises(ClosedError):
        connection.call(echo("x"))
    assert handler.raised is None
    proxy.wait_for(lambda: not proxy._links)


@pytest.mark.parametrize("kind", ["redis-8.6", "valkey-9"])
def test_nor_does_a_signal_handler_wait_for_a_durable_add(
    kind: str, private_server: Callable[..., Server], make_proxy: MakeProxy, queue_name: str
) -> None:
    server = private_server(kind, appendonly="yes", appendfsync="always")
    proxy = make_proxy(server.url)
    with sync.Queue(queue_name, redis_url=proxy.url, durable="disk") as queue:
        queue.add("n", 1)
        assert isinstance(queue._durable, BlockingDurableConnection)
        (line,) = queue._durable._lines.values()
        proxy.stall()

        def deed() -> None:
            try:
                queue.add("n", 2)
            finally:
                proxy.resume()

        with Handler(lambda: line.is_busy, deed) as handler:
            assert queue.add("n", 3).is_new
        assert type(handler.raised) is RuntimeError
        assert queue.add("n", 4).is_new
        assert queue.counts().waiting == 3
