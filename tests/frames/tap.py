"""A TCP proxy that keeps all bytes that clients send, connection by connection."""

import contextlib
import socket
import threading
import time

from tests.proxy import split

#: How long a scene may wait for a command, and a connection for its end.
WAIT_S = 20.0
_CHUNK_BYTES = 1 << 18


class Tap:
    """Stands between clients and the server at `port`. Clients go to `url`."""

    def __init__(self, port: int) -> None:
        self._upstream = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        #: What came over each connection, in the order of connections.
        self._sent: list[bytearray] = []
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def count(self, wanted: bytes) -> int:
        """How often these bytes have come since the last `take`."""
        return sum(sent.count(wanted) for sent in self._sent)

    def take(self) -> list[list[bytes]]:
        """The commands of each connection since the last call. Waits for the connections to end."""
        deadline_s = time.monotonic() + WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                raise RuntimeError("a scene has left a connection open")
        taken = [split(bytes(sent)) for sent in self._sent]
        if any(rest for _, rest in taken):
            raise RuntimeError("a connection ended within a command")
        self._sent, self._threads = [], []
        return [frames for frames, _ in taken]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._upstream)
            self._sent.append(sent := bytearray())
            thread = threading.Thread(target=_forward, args=(client, server, sent), daemon=True)
            self._threads.append(thread)
            thread.start()


def _forward(client: socket.socket, server: socket.socket, sent: bytearray) -> None:
    """Pass everything on, until the client has ended; keep what it sent."""
    for end in (client, server):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with client, server:
        back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
        back.start()
        _pass_on(client, server, sent)
        back.join()


def _pass_on(source: socket.socket, target: socket.socket, kept: bytearray | None = None) -> None:
    """Pass on what comes until one side ends; then end the other."""
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            if kept is not None:
                kept += chunk
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
