"""Processes that run handlers, each one job at a time: how they begin and how they end.

A process imports its handler and says so, takes a job and says so, then sends the outcome. So the
pool knows which jobs have begun: their time counts from there, and no job loses an attempt to a
process that dies idle. No thread is involved. A process ends when the pool ends it, by force if
needed, and when the worker's own process is gone.
"""

import asyncio
import contextlib
import contextvars
import fcntl
import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final

from chasqui.consuming.current import CURRENT
from chasqui.consuming.pools import AGAIN_S
from chasqui.consuming.runs import (
    CANCEL_S,
    NOT_FOR_FUTURES,
    NotBegunError,
    described,
    text_of,
    traceback_of,
)
from chasqui.consuming.throttled_log import ThrottledLog
from chasqui.errors import BatchError, UnrecoverableError
from chasqui.model.job import Job

logger = logging.getLogger(__name__)

#: How long a process may take to start, to import its handler and to take a job.
START_S: Final = 120.0
#: How often to check whether a process that was told to end is gone.
LOOK_S: Final = 0.01
#: Frames go both ways, each behind its length. An empty one means: ready, or begun.
_LENGTH: Final = struct.Struct(">Q")
#: The first byte of an outcome's frame: a result follows, or an error with its traceback.
_RETURNED, _RAISED = b"r", b"e"
_SPAWN: Final = multiprocessing.get_context("spawn")

#: Each process enters this while it imports its handler. It must be importable too.
around_import: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


class ProcessPool:
    """Runs one handler in processes, started when they are first needed."""

    def __init__(self, handler: Callable[[Any], Any], size: int, queue: str) -> None:
        """`size` is the most processes that there are at once."""
        self._queue = queue
        self._log = ThrottledLog(logger, queue)
        self._handler = pickle.dumps(handler)
        self.size = size
        self._room = asyncio.Semaphore(size)
        self._idle: list[_Process] = []
        #: All processes that may still exist, and the tasks that end some of them.
        self._living: set[_Process] = set()
        self._ends: set[asyncio.Task[None]] = set()
        #: Set when nothing more may begin.
        self.is_stopping = False

    @contextlib.asynccontextmanager
    async def begin(self, job: Any) -> AsyncIterator[Awaitable[Any]]:
        """Begin a run, and yield an awaitable for its result. If the block ends before the run,
        its process is ended."""
        frame = _framed(pickle.dumps(job))
        async with self._room:
            if self.is_stopping:
                raise NotBegunError
            process = await self._begin(frame)
            try:
                yield process.result()
            finally:
                if process.is_idle:
                    self._idle.append(process)
                else:
                    self._end(process)

    async def close(self) -> None:
        """End every process, within two seconds."""
        self._idle.clear()
        for process in list(self._living):
            self._end(process)
        if self._ends:
            await asyncio.wait(self._ends)

    async def _begin(self, frame: bytes) -> "_Process":
        """A process that has begun the job. Skips processes that died while idle; if a new one
        dies before it begins, the run has failed."""
        while True:
            is_new = not self._idle
            process = await self._start() if is_new else self._idle.pop()
            try:
                async with asyncio.timeout(START_S):
                    if is_new:
                        await process.is_ready()
                    await process.begin(frame)
            except BaseException as error:
                self._end(process)
                if isinstance(error, TimeoutError):
                    raise BrokenProcessPool(
                        f"the handler's process did not begin within {START_S:g} s"
                    ) from None
                if is_new or not isinstance(error, BrokenProcessPool):
                    raise
            else:
                return process

    async def _start(self) -> "_Process":
        while len(self._living) >= self.size:  # one of them is about to end
            await asyncio.wait(self._ends, return_when=asyncio.FIRST_COMPLETED)
        while True:
            try:
                process = _Process(self._handler)
            except OSError as error:
                text = "a handler of queue %s waits for a process: %s"
                self._log.warning(text, self._queue, error)
                await asyncio.sleep(AGAIN_S)
            else:
                self._living.add(process)
                return process

    def _end(self, process: "_Process") -> None:
        """End a process in the background; once it is gone another may start."""
        if process.is_ending:
            return
        process.is_ending = True
        end = asyncio.ensure_future(process.end())
        self._ends.add(end)

        def ended(task: asyncio.Task[None]) -> None:
            self._ends.discard(task)
            self._living.discard(process)

        end.add_done_callback(ended)


class _Process:
    """A process of the pool, as the worker sees it."""

    def __init__(self, handler: bytes) -> None:
        """Start the process."""
        self.is_idle = False
        self.is_ending = False
        self._line, theirs = socket.socketpair()
        try:
            with theirs:
                arguments = (theirs, handler, around_import)
                self._process = _SPAWN.Process(target=serve, args=arguments)
                self._process.start()
        except BaseException:
            self._line.close()
            raise
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def is_ready(self) -> None:
        """Wait until it has imported its handler."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._line)
        said = await self._read("before it could run the handler")
        if said:
            error, trace = pickle.loads(said[1:])
            raise RuntimeError(
                f"the handler cannot be imported in its process: {described(error)}"
            ) from _ThereError(trace)

    async def begin(self, frame: bytes) -> None:
        """Send it a job, and wait until it says that it runs the job."""
        assert self._writer is not None
        self.is_idle = False
        with contextlib.suppress(ConnectionError):  # the read finds out how it ended
            self._writer.write(frame)
            await self._writer.drain()
        await self._read("before it took the job")

    async def result(self) -> Any:
        """Return what its handler returned, or raise what it raised."""
        said = await self._read("while it ran the handler")
        self.is_idle = True
        kind, body = said[:1], memoryview(said)[1:]
        if kind == _RAISED:
            error, trace = pickle.loads(body)
            raise error from _ThereError(trace)
        try:
            return pickle.loads(body)
        except Exception:
            return _stand_in("value that cannot be unpickled")

    async def end(self) -> None:
        """Terminate it, or else kill it, and wait until it is gone."""
        if self._writer is None:
            self._line.close()
        else:
            self._writer.transport.abort()
        process = self._process
        try:
            for end in (process.terminate, process.kill):
                end()
                if await self._is_gone():
                    return
            fields = {"handler_pid": process.pid}
            logger.error("process %d of a handler cannot be killed", process.pid, extra=fields)
        except asyncio.CancelledError:
            process.kill()
            raise

    async def _is_gone(self) -> bool:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + CANCEL_S
        # Polled, since the sentinel proves nothing: a process that a handler forked keeps it open.
        while self._process.is_alive() and loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return not self._process.is_alive()

    async def _read(self, when: str) -> bytes:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            how = "hung up"
            if await self._is_gone():
                code = self._process.exitcode or 0
                how = f"ended with {f'code {code}' if code >= 0 else f'signal {-code}'}"
            raise BrokenProcessPool(f"the handler's process {how} {when}") from None


class _ThereError(Exception):
    """Shows in tracebacks where in the other process an error was raised."""

    def __init__(self, trace: str) -> None:
        super().__init__(f"in the handler's process:\n\n{trace}")


# ── In the process ──────────────────────────────────────────────────────────────────────────────


def serve(
    line: socket.socket,
    handler: bytes,
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Run jobs until the worker closes the line."""
    # Ctrl-C reaches this process too, but it is the worker that drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    # A process that a handler forks must not keep the line open when this one is gone.
    os.register_at_fork(after_in_child=line.close)
    with line, contextlib.suppress(ConnectionError):
        try:
            with around():
                run = pickle.loads(handler)
        except BaseException as error:
            line.sendall(_framed(_failure(error)))
            return
        line.sendall(_framed(b""))
        while (head := _receive(line, _LENGTH.size)) is not None:
            request = _receive(line, *_LENGTH.unpack(head))
            if request is None:
                return
            line.sendall(_framed(b""))
            line.sendall(_framed(_outcome(run, request)))


def _end_with_parent() -> None:
    """Have the system end this process when the worker's dies, whatever it runs then. A thread
    could do that too, but then a handler that forks would fork a process with threads."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A pipe through which nothing more comes, so that the only signal is its end.
    fd = parent.sentinel
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    else:
        signal.signal(signal.SIGIO, lambda number, frame: os._exit(1))
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():
        os._exit(1)


def _receive(line: socket.socket, length: int) -> bytearray | None:
    """Read `length` bytes; None if the line ends before that."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        received = line.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return data


def _outcome(run: Callable[[Any], Any], request: bytearray) -> bytes:
    """Run one job or batch, with its own context variables; its outcome as a frame's content.
    Coroutine functions get a loop of their own."""
    try:
        result = contextvars.copy_context().run(_run, run, pickle.loads(request))
    except BaseException as error:
        return _failure(error)
    try:
        return _RETURNED + pickle.dumps(result)
    except Exception:  # in a batch, the other results are good
        each = isinstance(result, list)
        sent = [_sendable(one) for one in result] if each else _Unsendable(result)
        return _RETURNED + pickle.dumps(sent)


def _run(run: Callable[[Any], Any], job: Any) -> Any:
    CURRENT.set(job if isinstance(job, Job) else None)
    result = run(job)
    return asyncio.run(_as_coroutine(result)) if inspect.isawaitable(result) else result


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _failure(error: BaseException) -> bytes:
    return _RAISED + pickle.dumps((_portable(error), traceback_of(error)))


def _portable(error: BaseException) -> BaseException:
    """The error, or one like it that another process can unpickle: some exceptions can be pickled
    but not unpickled."""
    if isinstance(error, BatchError):  # each of its jobs still has its own fate
        failures: dict[str, Any] = {one: _portable(why) for one, why in error.failures.items()}
        results = {one: _sendable(result) for one, result in error.results.items()}
        return BatchError(failures, results=results)
    try:
        pickle.loads(pickle.dumps(error))
        if not isinstance(error, NOT_FOR_FUTURES):
            return error
    except Exception:
        pass
    like = UnrecoverableError if isinstance(error, UnrecoverableError) else RuntimeError
    return like(f"{type(error).__name__}: {text_of(error)}")


def _sendable(result: Any) -> Any:
    try:
        pickle.loads(pickle.dumps(result))
    except Exception:
        return _Unsendable(result)
    return result


class _Unsendable:
    """Stands for a result that cannot be pickled, or not unpickled."""

    def __init__(self, result: Any) -> None:
        self._type = type(result)

    def __reduce__(self) -> tuple[Callable[[str, str], Any], tuple[str, str]]:
        return _stand_in, (self._type.__qualname__, self._type.__module__)


def _stand_in(name: str, module: str = "builtins") -> Any:
    """What the worker gets instead of such a result. If results are stored, it is refused with the
    name of the type in the error; if not, the run counts as done."""
    return type(name, (), {"__module__": module})()


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data
