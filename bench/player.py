"""Plays a server's part from a script, in a thread of this process: to time our side alone.

It knows as much as one worker or producer asks. Benchmarks only: tests have real servers.
"""

import socket
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import hiredis

HELLO = b"%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n8.6.3\r\n"
COMMANDS = b"*2\r\n*1\r\n$7\r\nxackdel\r\n*1\r\n$7\r\nwaitaof\r\n"
NO_GROUP = b"-NOGROUP No such key or consumer group\r\n"
OK, NONE, ONE, EMPTY = b"+OK\r\n", b":0\r\n", b":1\r\n", b"*0\r\n"


class Player:
    """Answers every connection: reads get the replies in turn and then wait; acks are taken."""

    def __init__(self, reads: Iterable[bytes] = (), script_reply: bytes = EMPTY) -> None:
        self._reads = iter(reads)
        self._script_reply = script_reply
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "socket")
        self.url = f"unix://{path}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = hiredis.Reader()
        with connection:
            try:
                while data := connection.recv(1 << 18):
                    reader.feed(data)
                    while (command := reader.gets()) is not False:
                        if (reply := self._reply(command)) is not None:
                            connection.sendall(reply)
            except OSError:
                return  # the other side is done

    def _reply(self, command: list[bytes]) -> bytes | None:
        match command[0]:
            case b"HELLO":
                return HELLO
            case b"COMMAND":
                return COMMANDS
            case b"XREADGROUP":
                if b"chasqui-probe" in command:
                    return NO_GROUP
                return next(self._reads, None)  # none left: as if it blocked
            case b"EVALSHA" | b"EVAL":
                return self._script_reply
            case b"XACKDEL":
                count = int(command[4])
                return b"*%d\r\n" % count + ONE * count
            case b"XADD":
                return b"$3\r\n1-1\r\n"
            case b"EXISTS" | b"DEL":
                return NONE
            case _:
                return OK
