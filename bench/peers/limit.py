"""What the machine allows: the same bytes without a library around them.

`bulk` sends the very frames that chasqui would, prebuilt, over a plain socket, and counts replies.
`drain` reads 1000 entries at a time, parses them with hiredis and acknowledges them, and no more.
"""

import json
import socket
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import hiredis

from bench.peers import harness
from bench.peers.chasqui import Chasqui
from bench.peers.harness import PAYLOAD, Data, Unsupported
from bench.peers.meter import Meter
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.producing import job_options
from chasqui.producing.operations import QueueOperations
from chasqui.producing.settings import PLAIN
from chasqui.scripts.adding import ADD
from chasqui.transport.request import Request

READ = 1000


class Wire:
    """A plain socket with hiredis behind it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()

    def ask(self, frame: bytes, count: int) -> list[Any]:
        """Send bytes, and take so many replies."""
        self.send(frame)
        return self.receive(count)

    def send(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def receive(self, count: int) -> list[Any]:
        replies: list[Any] = []
        while len(replies) < count:
            self._reader.feed(self._socket.recv(1 << 18))
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, Exception):
                    raise reply
                replies.append(reply)
        return replies

    def command(self, *words: object) -> Any:
        return self.ask(hiredis.pack_command(words), 1)[0]  # type: ignore[arg-type]


def frames(n: int, size: int, body_bytes: int) -> Iterator[tuple[bytes, int]]:
    """What chasqui sends for each call of add_bulk, with the number of replies."""
    operations = QueueOperations(Keys("bench"), None)
    data = harness.payloads(1, body_bytes)[0] if body_bytes else PAYLOAD
    jobs = [{"name": "welcome", "data": data} for _ in range(size)]
    for _ in range(n // size):
        asked = next(operations.add(job_options.many(jobs, 0), PLAIN))
        requests = [asked] if isinstance(asked, Request) else list(asked)
        yield b"".join(request.frame for request in requests), sum(r.count for r in requests)


def bulk(url: str, n: int, size: int, body_bytes: int = 0, ready: bool = True) -> Data:
    wire = Wire(url)
    wire.command("SCRIPT", "LOAD", ADD.source)
    calls = list(frames(n, size, body_bytes))
    meter = Meter(url)
    for frame, count in calls:
        wire.ask(frame, count)
    told = meter.spent(n // size * size)
    length = wire.command("XLEN", Keys("bench").stream)
    if length != n // size * size:
        return {"error": f"{length} entries of {n} jobs"}
    return told


def drain(url: str, n: int, events: bool = False, **_: object) -> Data:
    if events:
        raise Unsupported("told by the server's CPU")
    wire, stream = Wire(url), Keys("bench").stream
    has_xackdel = bool(wire.command("COMMAND", "INFO", "XACKDEL")[0])
    wire.command("XGROUP", "CREATE", stream, DEFAULT_GROUP, 0)
    read = hiredis.pack_command(
        ("XREADGROUP", "GROUP", DEFAULT_GROUP, "c", "COUNT", READ, "STREAMS", stream, b">")
    )
    meter = Meter(url)
    seen, frame, count = 0, read, 1
    while reply := wire.ask(frame, count)[-1]:
        ids = [entry[0] for entry in reply[0][1]]
        seen += len(ids)
        if has_xackdel:
            ack = hiredis.pack_command(("XACKDEL", stream, DEFAULT_GROUP, "IDS", len(ids), *ids))
            frame, count = ack + read, 2
        else:
            ack = hiredis.pack_command(("XACK", stream, DEFAULT_GROUP, *ids))
            frame, count = ack + hiredis.pack_command(("XDEL", stream, *ids)) + read, 3
    told = meter.spent(seen)
    left = wire.command("XLEN", stream)
    return told if seen == n and not left else {"error": f"read {seen} of {n}, left {left}"}


class Limit(Chasqui):
    packages = ("chasqui", "hiredis")


def main() -> None:
    asked = json.loads(sys.argv[1])
    scenario = {"bulk": bulk, "drain": drain}.get(asked["scenario"])
    peer = Limit(asked["url"], False, False)
    if asked["scenario"] == "fill":
        harness.main(Limit)
    elif scenario is None:
        harness.tell(peer, {"unsupported": "no limit is known"})
    else:
        del asked["scenario"]
        asked.pop("limit_s", None)
        try:
            harness.tell(peer, scenario(**asked))
        except Unsupported as reason:
            harness.tell(peer, {"unsupported": str(reason)})


if __name__ == "__main__":
    main()
