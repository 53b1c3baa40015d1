"""What the core writes is what servers take, and what they answer is what the core reads."""

import hashlib
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import (
    evalsha,
    evalsha_jobs,
    xackdel,
    xadd_event,
    xreadgroup,
)
from chasqui._core.entry import EntryBuilder
from chasqui._core.envelope import decode_envelope, encode_retry
from chasqui._core.reply import INCOMPLETE, ReplyReader
from chasqui._core.ulid import UlidFactory
from tests.servers import RemoteServer, Server

NOW_MS = 1_794_797_194_811
GROUP = b"default"
STREAMS = EntryBuilder("streams")
RANGE = EntryBuilder("range")


class Wire:
    """A plain socket between a CommandBuffer and a ReplyReader."""

    def __init__(self, server: Server | RemoteServer, protocol: int) -> None:
        where = urlsplit(server.url)
        self.socket = socket.create_connection((where.hostname, where.port or 6379), timeout=10)
        self.buffer, self.reader = CommandBuffer(), ReplyReader()
        hello = self.ask("HELLO", protocol)
        about = hello if protocol == 3 else dict(zip(hello[::2], hello[1::2], strict=True))
        major, minor, *_ = about[b"version"].split(b".")
        #: What this Redis can do; what is no Redis can do none of it.
        self.version = (int(major), int(minor)) if about[b"server"] == b"redis" else (0, 0)

    def ask(self, *arguments: Any, builder: EntryBuilder | None = None) -> Any:
        """The answer to one command."""
        self.buffer.command(*arguments)
        return self.flush(builder)[0]

    def flush(self, builder: EntryBuilder | None = None) -> list[Any]:
        """The answers to everything in the buffer."""
        self.socket.sendall(bytes(self.buffer))
        answers: list[Any] = []
        while len(answers) < self.buffer.commands:
            reply = self.reader.read(builder)
            if reply is INCOMPLETE:
                self.reader.feed(self.socket.recv(100))  # small: replies come in pieces
            else:
                answers.append(reply)
        self.buffer.clear()
        return answers


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
def wire(server: Server | RemoteServer, request: pytest.FixtureRequest) -> Iterator[Wire]:
    wire = Wire(server, request.param)
    yield wire
    wire.socket.close()


@pytest.fixture
def key(wire: Wire, queue_name: str) -> bytes:
    key = f"{{chasqui:{queue_name}}}:stream".encode()
    assert wire.ask("XGROUP", "CREATE", key, GROUP, "0", "MKSTREAM") == b"OK"
    return key


#: Adds its jobs one by one; the ids of their entries.
ADD = b"""
local ids = {}
for i = 1, #ARGV, 2 do
  local fields = {'d', ARGV[i]}
  if ARGV[i + 1] ~= '' then fields[3], fields[4] = 'n', ARGV[i + 1] end
  ids[#ids + 1] = redis.call('XADD', KEYS[1], '*', unpack(fields))
end
return ids
"""
ADD_SHA = hashlib.sha1(ADD).hexdigest().encode()


def add(wire: Wire, key: bytes, count: int) -> list[str]:
    payloads = [b"\x93\x01\x02" + bytes([i]) for i in range(count)]
    names = [f"name-{i % 3}" if i % 3 else "" for i in range(count)]
    retries = [encode_retry(i) if i % 2 else None for i in range(count)]
    assert wire.ask("SCRIPT", "LOAD", ADD) == ADD_SHA
    ids = evalsha_jobs(
        wire.buffer, ADD_SHA, [key], [], UlidFactory(), NOW_MS, payloads, names, None, retries
    )
    (answers,) = wire.flush()
    assert len(set(answers)) == count
    assert all(type(answer) is bytes for answer in answers), answers
    return ids


def check(entries: list[Any], ids: list[str]) -> None:
    """The entries are those that `add` added, whole and in order."""
    assert [entry.job_id for entry in entries] == ids
    for i, entry in enumerate(entries):
        assert (entry.fault, entry.payload) == (None, b"\x93\x01\x02" + bytes([i]))
        assert entry.name == (f"name-{i % 3}" if i % 3 else "")
        assert (entry.created_at_ms, entry.attempt) == (NOW_MS, 0)
        assert entry.max_attempts == (i if i % 2 else None)


def test_jobs_are_added_read_and_ranged(wire: Wire, key: bytes):
    ids = add(wire, key, 50)
    check(wire.ask("XRANGE", key, "-", "+", builder=RANGE), ids)
    xreadgroup(wire.buffer, GROUP, b"c", key, count=100, block_ms=10)
    (entries,) = wire.flush(STREAMS)
    check(entries, ids)
    xreadgroup(wire.buffer, GROUP, b"c", key, block_ms=1)
    assert wire.flush(STREAMS) == [None]
    xreadgroup(wire.buffer, GROUP, b"c", key, last_id=b"0")
    check(wire.flush(STREAMS)[0], ids)


def test_entries_are_acknowledged_and_deleted(wire: Wire, key: bytes):
    add(wire, key, 3)
    xreadgroup(wire.buffer, GROUP, b"c", key)
    ids = [entry.id for entry in wire.flush(STREAMS)[0]]
    if wire.version >= (8, 2):
        xackdel(wire.buffer, key, GROUP, [*ids, b"1-1"])
        assert wire.flush() == [[1, 1, 1, -1]]
    else:
        xackdel(wire.buffer, key, GROUP, ids)
        assert [answer.code for answer in wire.flush()] == ["ERR"]
        assert wire.ask("XACK", key, GROUP, *ids) == wire.ask("XDEL", key, *ids) == 3
    assert wire.ask("XLEN", key) == 0
    assert wire.ask("XPENDING", key, GROUP)[0] == 0


def test_idle_entries_are_claimed(wire: Wire, key: bytes):
    ids = add(wire, key, 4)
    xreadgroup(wire.buffer, GROUP, b"dead", key, count=3)
    read = wire.flush(STREAMS)[0]
    if wire.version >= (8, 4):
        xreadgroup(wire.buffer, GROUP, b"c", key, count=9, claim_min_idle_ms=0)
        (entries,) = wire.flush(STREAMS)
        check(entries, ids)
        assert [entry.deliveries > 0 for entry in entries] == [True, True, True, False]
    check(wire.ask("XCLAIM", key, GROUP, "d", 0, read[0].id, builder=RANGE), ids[:1])
    wire.ask("XDEL", key, read[1].id)
    claimed = wire.ask("XCLAIM", key, GROUP, "e", 0, *(one.id for one in read), builder=RANGE)
    assert [entry.id for entry in claimed if entry] == [read[0].id, read[2].id]


def test_event_entries(wire: Wire, key: bytes):
    xadd_event(wire.buffer, key + b":events", b"active", "id", NOW_MS, "n", ["x", 1])
    assert all(type(answer) is bytes for answer in wire.flush())
    ((_, fields),) = wire.ask("XRANGE", key + b":events", "-", "+")
    assert b" ".join(fields) == b"e active id id ts %d n n x 1" % NOW_MS


def test_scripts_get_their_keys_arguments_and_jobs(wire: Wire, key: bytes):
    script = b"return {KEYS, ARGV}"
    sha = hashlib.sha1(script).hexdigest().encode()
    assert wire.ask("SCRIPT", "LOAD", script) == sha
    evalsha(wire.buffer, sha, [key], [b"x", 7, "ü"])
    ids = evalsha_jobs(
        *(wire.buffer, sha, [key], [2], UlidFactory(), NOW_MS, [b"\x01", b"\x02"], ["a", ""]),
        *([None, "mine"], None, [0, NOW_MS + 5]),
    )
    evalsha(wire.buffer, b"0" * 40, [], [])
    plain, (keys, words), missing = wire.flush()
    assert plain == [[key], [b"x", b"7", "ü".encode()]]
    assert (keys, words[0]) == ([key], b"2")
    assert (words[2:4], words[5:]) == ([b"a", b"0"], [b"", b"%d" % (NOW_MS + 5)])
    assert [decode_envelope(words[i]).id for i in (1, 4)] == ids
    assert missing.code == "NOSCRIPT"
