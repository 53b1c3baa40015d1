"""A TCP proxy that breaks links on purpose, at a chosen command, reply or byte.

It knows where commands and replies end, so that a fault falls exactly where the test wants it; and
it tells what passed, so that a test can wait for that instead of for time. It runs in threads of
its own: blocking and asyncio tests use it alike, and so do other processes.
"""

import contextlib
import enum
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

#: How long a test waits for a fact before it fails.
WAIT_S = 20.0

_CHUNK_BYTES = 1 << 18


class Fault(enum.Enum):
    """What happens to a command that a rule picks."""

    #: It never reaches the server; the link is cut.
    CUT_BEFORE = enum.auto()
    #: The server has answered it; the answer is lost and the link is cut.
    CUT_AFTER = enum.auto()
    #: The answer arrives; then the link is cut.
    CUT_BEHIND = enum.auto()
    #: The server has answered it; the answer is lost, and the link stays.
    SWALLOW = enum.auto()
    #: The answer is replaced by bytes that are no RESP.
    GARBAGE = enum.auto()
    #: It does not reach the server, and from then on nothing passes on any link: `is_held`.
    HOLD_BEFORE = enum.auto()
    #: The same once the server has answered it: the answer does not pass.
    HOLD_AFTER = enum.auto()


#: The reply that meets one of these is the last of its link.
_CUTTING_REPLIES = (Fault.CUT_AFTER, Fault.CUT_BEHIND, Fault.HOLD_AFTER)


class Proxy:
    """Forwards between its own port and a server. Faults are armed by methods, any number of times.

    `url` is where clients go. Ends with `close()` or its `with` block.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = _address(upstream)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        #: The names of the commands that came, in order, handshakes included.
        self.commands: list[bytes] = []
        #: For each read from a client, how many commands it brought.
        self.reads: list[int] = []
        #: Links accepted so far.
        self.accepted = 0
        #: Bytes that came from clients.
        self.bytes_in = 0
        #: Waits before each forward, in both directions.
        self.delay_s = 0.0
        #: The most bytes that are forwarded at once.
        self.piece_bytes = _CHUNK_BYTES
        #: New links are cut as soon as they are accepted.
        self.is_refusing = False
        #: A fault has stopped everything, so that whoever is behind it can be killed there.
        self.is_held = False
        self._fact = threading.Condition()
        self._flows = threading.Event()
        self._flows.set()
        self._is_closed = False
        self._rules: list[_Rule] = []
        self._budgets: dict[str, int] = {}
        self._links: set[_Link] = set()
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    # ── Faults ──────────────────────────────────────────────────────────────────────────────────

    def fail(
        self, fault: Fault, command: str, *, nth: int = 1, times: int = 1, holding: bytes = b""
    ) -> None:
        """Let a fault happen to the nth command of this name from now on, and to those after it
        until it has happened `times` times. Only those count that have `holding` in their bytes."""
        with self._fact:
            self._rules.append(_Rule(fault, command.upper().encode(), nth, times, holding))

    def forget(self) -> None:
        """Let nothing happen any more that `fail` asked for."""
        with self._fact:
            self._rules.clear()

    def cut_after_bytes(self, count: int, *, to_server: bool) -> None:
        """Cut the link after so many more bytes in one direction."""
        with self._fact:
            self._budgets["server" if to_server else "client"] = count

    def disarm(self) -> bool:
        """Forget the faults that have not happened; whether there were any."""
        with self._fact:
            was_armed = bool(self._rules or self._budgets)
            self._rules.clear()
            self._budgets.clear()
        return was_armed

    def cut(self) -> None:
        """Cut all links now."""
        with self._fact:
            links = list(self._links)
        for link in links:
            link.cut()

    def point_to(self, upstream: str) -> None:
        """From now on another server answers here."""
        self._upstream = _address(upstream)
        self.cut()

    def silence(self) -> None:
        """Let nothing pass on the links that are there, without a word to either end; new ones are
        not affected. So does a cable that is pulled out."""
        with self._fact:
            for link in self._links:
                link.is_silent = True

    def stall(self) -> None:
        """Forward nothing and read no more, in both directions, until `resume`."""
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    # ── Facts ───────────────────────────────────────────────────────────────────────────────────

    @property
    def open_links(self) -> int:
        with self._fact:
            return len(self._links)

    def count(self, command: str) -> int:
        """How many commands of this name have come."""
        with self._fact:
            return self.commands.count(command.upper().encode())

    def wait_for(self, fact: Callable[[], bool]) -> None:
        """Return when something true of this proxy has become true."""
        with self._fact:
            if not self._fact.wait_for(fact, WAIT_S):
                raise AssertionError(f"it never came true; the proxy saw {self.commands[-20:]}")

    def close(self) -> None:
        self._is_closed = True
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ── Threads ─────────────────────────────────────────────────────────────────────────────────

    def _spawn(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_refusing or self._is_closed:
                client.close()
                continue
            try:
                server = self._dial()
            except OSError:
                client.close()
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(client, server)
            with self._fact:
                self._links.add(link)
                self.accepted += 1
                self._fact.notify_all()
            if self.is_refusing:  # since it was accepted; who refuses and cuts may have missed it
                link.cut()
            self._spawn(lambda link=link: self._run(link, self._forward_commands))
            self._spawn(lambda link=link: self._run(link, self._forward_replies))

    def _dial(self) -> socket.socket:
        if isinstance(self._upstream, str):
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._upstream)
            return server
        server = socket.create_connection(self._upstream)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    def _run(self, link: "_Link", forward: Callable[["_Link"], None]) -> None:
        with contextlib.suppress(OSError):
            forward(link)
        link.cut()
        if link.leave():
            with self._fact:
                self._links.discard(link)
                self._fact.notify_all()

    def _forward_commands(self, link: "_Link") -> None:
        rest = b""
        while chunk := self._read(link, link.client):
            frames, unfinished = split(rest + chunk)
            keep = -len(rest)  # of the chunk; what was unfinished has been forwarded already
            is_cut = is_held = False
            with self._fact:
                for frame in frames:
                    self.commands.append(_name(frame))
                    fault = self._fault_for(self.commands[-1], frame)
                    is_held = is_held or fault is Fault.HOLD_BEFORE
                    is_cut = is_cut or is_held or fault is Fault.CUT_BEFORE
                    if not is_cut:
                        link.faults.append(fault)
                        keep += len(frame)
                self.bytes_in += len(chunk)
                self.reads.append(len(frames))
                self._fact.notify_all()
            data = chunk[: max(0, keep)] if is_cut else chunk
            rest = unfinished
            if not self._send(link.server, data, "server") or is_cut:
                if is_held:
                    self._hold()
                return

    def _forward_replies(self, link: "_Link") -> None:
        rest = b""
        while chunk := self._read(link, link.server):
            frames, rest = split(rest + chunk)
            out = []
            fault = None
            for frame in frames:
                # Pushes answer no command, nor does a server that has no place for one more.
                is_answer = bool(link.faults) and not frame.startswith(b">")
                fault = link.faults.popleft() if is_answer else None
                if fault in (Fault.CUT_AFTER, Fault.HOLD_AFTER):
                    break
                if fault is Fault.GARBAGE:
                    out.append(b"?what\r\n")
                elif fault is not Fault.SWALLOW:
                    out.append(frame)
                if fault is Fault.CUT_BEHIND:
                    break
            is_sent = self._send(link.client, b"".join(out), "client")
            if fault is Fault.HOLD_AFTER:
                self._hold()
            if not is_sent or fault in _CUTTING_REPLIES:
                return

    def _hold(self) -> None:
        """Stop everything; return when the test has gone on."""
        self._flows.clear()
        with self._fact:
            self.is_held = True
            self._fact.notify_all()
        self._flows.wait()

    def _fault_for(self, name: bytes, frame: bytes) -> Fault | None:
        for rule in list(self._rules):
            if rule.name == name and rule.holding in frame:
                rule.skip -= 1
                if rule.skip < 0:
                    rule.times -= 1
                    if rule.times == 0:
                        self._rules.remove(rule)
                    return rule.fault
        return None

    def _read(self, link: "_Link", sock: socket.socket) -> bytes:
        """What came next; empty at the end of the link."""
        while True:
            self._flows.wait()
            data = sock.recv(_CHUNK_BYTES)
            self._flows.wait()
            if not data or not link.is_silent:
                return data

    def _send(self, sock: socket.socket, data: bytes, direction: str) -> bool:
        """Forward; False when the link is to be cut there."""
        while len(data) > (piece_bytes := self.piece_bytes):
            if not self._send(sock, data[:piece_bytes], direction):
                return False
            data = data[piece_bytes:]
        if self.delay_s:
            time.sleep(self.delay_s)
        with self._fact:
            budget = self._budgets.get(direction)
            if budget is not None:
                self._budgets[direction] = budget - len(data)
                if budget <= len(data):
                    del self._budgets[direction]
        if budget is not None and budget <= len(data):
            sock.sendall(data[:budget])
            return False
        sock.sendall(data)
        return True


class _Rule:
    def __init__(self, fault: Fault, name: bytes, nth: int, times: int, holding: bytes) -> None:
        self.fault = fault
        self.name = name
        self.skip = nth - 1
        self.times = times
        self.holding = holding


class _Link:
    """A client's socket and the server's, and the fault that each awaited reply will meet."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.faults: deque[Fault | None] = deque()
        self.is_silent = False
        self._threads = 2
        self._lock = threading.Lock()

    def cut(self) -> None:
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def leave(self) -> bool:
        """One of the two threads is done; True for the last, which closes the sockets."""
        with self._lock:
            self._threads -= 1
            is_last = self._threads == 0
        if is_last:
            self.client.close()
            self.server.close()
        return is_last


def _address(url: str) -> str | tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return parts.hostname or "127.0.0.1", parts.port or 6379


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole RESP frames at the start of some bytes, and the rest."""
    frames = []
    start = 0
    while (end := _end(data, start)) is not None:
        frames.append(data[start:end])
        start = end
    return frames, data[start:]


def _end(data: bytes, start: int) -> int | None:
    """Where the frame that starts here ends; None if it is not whole."""
    wanted = 1
    while wanted:
        line_end = data.find(b"\r\n", start)
        if line_end < 0:
            return None
        kind, number = data[start : start + 1], data[start + 1 : line_end]
        start = line_end + 2
        wanted -= 1
        if kind in (b"$", b"=", b"!"):
            if int(number) >= 0:
                start += int(number) + 2
                if start > len(data):
                    return None
        elif kind in (b"*", b"~", b">"):
            wanted += max(0, int(number))
        elif kind in (b"%", b"|"):
            wanted += 2 * int(number) + (kind == b"|")
    return start


def _name(frame: bytes) -> bytes:
    """The name of a command, from its frame: *n, $length, name."""
    return frame.split(b"\r\n", 3)[2].upper()
