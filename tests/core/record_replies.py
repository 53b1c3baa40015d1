"""Records what real servers answer into replies.json: `python -m tests.core.record_replies`.

Every command is followed by an ECHO of a marker, so that a reply ends where the marker begins:
nothing here depends on the parser that the recordings test.
"""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

from tests.servers import KINDS, Server

RECORDED = Path(__file__).parent / "replies.json"
#: Longer replies would only repeat themselves, at every byte.
MAX_REPLY_BYTES = 1500

MARKER = b"0f8a6c-end-of-reply"
ENVELOPE = bytes.fromhex(
    "94ba30314d3748335a4b485638333441434251305947533847505443c40d82a2746fa56140622e63a16e01"
    "cf000001a1e23fce3b00"
)
WITH_RETRY = bytes.fromhex("95a3646964c40101cf000001a1e23fce3b02920395a5666978656464c0c0c0")

#: What the fields of a recorded entry may be.
FIELDS: list[list[bytes]] = [
    [b"d", ENVELOPE, b"n", b"welcome"],
    [b"d", ENVELOPE],
    [b"n", b"welcome", b"d", WITH_RETRY],
    [b"d", WITH_RETRY, b"n", "ünï-名".encode(), b"source_id", b"1-1", b"reason", b"malformed"],
    [b"x", b"1"],
    [b"d", b"", b"n", b""],
    [b"d", b"\xc1\r\n$5\r\n", b"n", b"not \xff utf-8"],
    [b"d", ENVELOPE, b"d", WITH_RETRY, b"\r\n", b"\r\n"],
    [b"detail", b"worker lost", b"d", ENVELOPE, b"n", b"n" * 60],
    [b"d", WITH_RETRY + b"\xc0", b"n", b"mail"],
    [b"", b"", b"n", b"mail", b"e", b"waiting"],
]

#: Replies of every other type: no entries in them.
PLAIN: list[list[bytes | str | int]] = [
    ["PING"],
    ["PING", b"\r\n"],
    ["ECHO", b""],
    ["ECHO", bytes(range(256))],
    ["ECHO", b"x" * 1000],
    ["SET", "k", "v"],
    ["SET", "k", "w", "NX"],
    ["GET", "k"],
    ["GET", "absent"],
    ["SET", "h", "text"],
    ["LPUSH", "h", "x"],
    ["NOSUCHCOMMAND", "x"],
    ["GET"],
    ["EVALSHA", "0" * 40, 0],
    ["XREADGROUP", "GROUP", "g", "c", "STREAMS", "absent", ">"],
    ["INCR", "n"],
    ["INCRBY", "n", -(2**62)],
    ["INCRBY", "n", 2**62],
    ["INCRBYFLOAT", "f", "3.25"],
    ["MGET", "k", "absent", "n"],
    ["HSET", "hash", "a", "1", "b", ""],
    ["HGETALL", "hash"],
    ["HGETALL", "absent"],
    ["HMGET", "hash", "a", "nope"],
    ["SADD", "set", "a", "b", "c"],
    ["SMEMBERS", "set"],
    ["SMEMBERS", "absent"],
    ["SMISMEMBER", "set", "a", "z"],
    ["ZADD", "z", "1", "a", "2.5", "b", "inf", "c", "-inf", "d", "1e300", "e"],
    ["ZRANGE", "z", "0", "-1", "WITHSCORES"],
    ["ZSCORE", "z", "b"],
    ["ZSCORE", "z", "c"],
    ["ZSCORE", "z", "absent"],
    ["ZMSCORE", "z", "a", "x", "d"],
    ["ZPOPMIN", "z"],
    ["BZPOPMIN", "absent", "0.01"],
    ["LPOS", "absent", "x"],
    ["LPOP", "absent", "3"],
    ["TYPE", "k"],
    ["OBJECT", "ENCODING", "n"],
    ["CONFIG", "GET", "maxmemory*"],
    ["COMMAND", "INFO", "get", "nosuch"],
    ["COMMAND", "COUNT"],
    ["MEMORY", "DOCTOR"],
    ["CLIENT", "GETNAME"],
    ["CLIENT", "TRACKINGINFO"],
    ["TIME"],
    ["LATENCY", "LATEST"],
    ["EXEC"],
    ["EVAL", "return 1.9", 0],
    ["EVAL", "return {}", 0],
    ["EVAL", "return {1,'a',{2,{3,{4,{5}}}},false,true}", 0],
    ["EVAL", "return redis.status_reply('FINE')", 0],
    ["EVAL", "return redis.error_reply('MINE words of mine')", 0],
    ["EVAL", "return {redis.error_reply('ERR inside'), 1}", 0],
    ["EVAL", "redis.setresp(3); return redis.call('HGETALL', KEYS[1])", 1, "hash"],
    ["EVAL", "redis.setresp(3); return redis.call('SMEMBERS', KEYS[1])", 1, "set"],
    ["EVAL", "redis.setresp(3); return redis.call('ZSCORE', KEYS[1], 'b')", 1, "z"],
    ["EVAL", "redis.setresp(3); return {double=3.5}", 0],
    ["EVAL", "redis.setresp(3); return {map={a=1}}", 0],
    ["EVAL", "redis.setresp(3); return {set={a=true}}", 0],
    ["EVAL", "redis.setresp(3); return {big_number='-12345678901234567890123456789'}", 0],
    ["EVAL", "redis.setresp(3); return {verbatim_string={format='txt',string='so'}}", 0],
    ["EVAL", "redis.setresp(3); return true", 0],
    ["EVAL", "redis.setresp(3); return {false,true}", 0],
    *[["DEBUG", "PROTOCOL", kind] for kind in (
        "string", "integer", "double", "null", "array", "set", "map", "attrib", "push", "verbatim",
        "true", "false", "bignum",
    )],
    ["CLIENT", "TRACKING", "ON"],
    ["GET", "k"],
    ["SET", "k", "seen by the tracker"],
    ["CLIENT", "TRACKING", "OFF"],
]  # fmt: skip

#: Commands that leave a mode behind unless their last one follows at once.
TOGETHER: list[list[list[bytes | str | int]]] = [
    [
        ["MULTI"],
        ["SET", "k", "v"],
        ["GET", "k"],
        ["HGETALL", "hash"],
        ["LPUSH", "k", "x"],
        ["EXEC"],
    ],
    [["MULTI"], ["NOSUCHCOMMAND"], ["EXEC"]],
    [["SUBSCRIBE", "one", "two"], ["UNSUBSCRIBE", "two", "one"]],
]


class Wire:
    """A plain socket to a server, in one protocol version."""

    def __init__(self, server: Server, protocol: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        self.greeting = self.ask("HELLO", protocol)

    def ask(self, *arguments: bytes | str | int) -> bytes:
        """The bytes that the server sends for a command, out-of-band messages among them."""
        return self.send(frame(*arguments))

    def send(self, commands: bytes) -> bytes:
        """The same for commands that are framed already."""
        self.socket.sendall(commands + frame("ECHO", MARKER))
        end, answer = b"$%d\r\n%b\r\n" % (len(MARKER), MARKER), b""
        while not answer.endswith(end):
            chunk = self.socket.recv(1 << 16)
            if not chunk:
                raise ConnectionError(f"the server hung up on {commands!r}: {answer!r}")
            answer += chunk
        return answer.removesuffix(end)

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


def frame(*arguments: bytes | str | int) -> bytes:
    """One command, in the plainest way."""
    words = [word if isinstance(word, bytes) else str(word).encode() for word in arguments]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def conversation(wire: Wire) -> Iterator[tuple[str | None, bytes]]:
    """Every reply in turn, with the shape of entries that it has."""
    yield None, wire.greeting
    for number, fields in enumerate([*FIELDS, None]):
        yield from stream(wire, f"s{number}", [fields] * 2 if fields else FIELDS[:5])
    for arguments in PLAIN:
        yield None, wire.ask(*arguments)
    for commands in TOGETHER:
        yield None, wire.send(b"".join(frame(*arguments) for arguments in commands))


def stream(wire: Wire, key: str, rows: list[list[bytes]]) -> Iterator[tuple[str | None, bytes]]:
    """The life of a stream of these entries: read, claimed, deleted while pending, read again."""

    def ask(shape: str | None, *arguments: bytes | str | int) -> tuple[str | None, bytes]:
        return shape, wire.ask(*arguments)

    ids = [f"1794797194831-{number}" for number in range(len(rows))]
    read = ["XREADGROUP", "GROUP", "default"]
    yield ask(None, "XGROUP", "CREATE", key, "default", "0", "MKSTREAM")
    yield ask(None, "XGROUP", "CREATE", key, "default", "0", "MKSTREAM")
    yield ask("streams", *read, "a", "STREAMS", key, ">")
    yield ask("range", "XRANGE", key, "-", "+")
    for id_, row in zip(ids, rows, strict=True):
        yield ask(None, "XADD", key, id_, *row)
    yield ask("range", "XRANGE", key, "-", "+")
    yield ask("range", "XREVRANGE", key, "+", "-", "COUNT", 1)
    yield ask("streams", *read, "a", "COUNT", 1, "STREAMS", key, ">")
    yield ask("streams", *read, "a", "STREAMS", key, ">")
    yield ask("streams", *read, "a", "STREAMS", key, "0")
    yield ask("streams", *read, "b", "COUNT", 9, "CLAIM", 0, "STREAMS", key, ">")
    yield ask("range", "XCLAIM", key, "default", "b", 0, ids[0])
    yield ask(None, "XCLAIM", key, "default", "b", 0, ids[0], "JUSTID")
    yield ask(None, "XPENDING", key, "default")
    yield ask(None, "XPENDING", key, "default", "-", "+", 1)
    yield ask(None, "XAUTOCLAIM", key, "default", "c", 0, "0", "COUNT", 1)
    yield ask(None, "XAUTOCLAIM", key, "default", "c", 0, "0")
    yield ask(None, "XDEL", key, ids[0])
    yield ask("streams", *read, "c", "STREAMS", key, "0")
    yield ask("range", "XCLAIM", key, "default", "d", 0, *ids)
    yield ask(None, "XAUTOCLAIM", key, "default", "d", 0, "0")
    yield ask(None, "XAUTOCLAIM", key, "default", "d", 0, "0")
    yield ask("streams", *read, "d", "CLAIM", 0, "STREAMS", key, ">")
    yield ask(None, "XACKDEL", key, "default", "IDS", 2, ids[0], ids[1])
    yield ask(None, "XACK", key, "default", *ids)
    yield ask(None, "XINFO", "STREAM", key)
    yield ask(None, "XINFO", "GROUPS", key)
    yield ask("streams", *read, "d", "BLOCK", 1, "STREAMS", key, ">")


def record() -> list[dict[str, str | None]]:
    """One of each reply, by every kind of server in both protocols."""
    seen: dict[tuple[str | None, bytes], dict[str, str | None]] = {}
    for kind in KINDS:
        for protocol in (2, 3):
            settings = {} if kind == "redis-6.2" else {"enable_debug_command": "yes"}
            with Server(kind, **settings) as server:
                wire = Wire(server, protocol)
                for shape, reply in conversation(wire):
                    if 0 < len(reply) <= MAX_REPLY_BYTES:
                        source = f"{kind} RESP{protocol}"
                        row = {"source": source, "shape": shape, "bytes": reply.decode("latin-1")}
                        seen.setdefault((shape, reply), row)
                wire.close()
    return list(seen.values())


if __name__ == "__main__":
    replies = record()
    rows = ",\n".join(json.dumps(reply, separators=(",", ":")) for reply in replies)
    RECORDED.write_text(f"[\n{rows}\n]\n")
    print(f"{len(replies)} replies in {RECORDED.name}")
