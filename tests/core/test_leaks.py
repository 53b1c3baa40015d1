"""Every public function, called again and again, in success and in failure, keeps nothing."""

import collections
import gc
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from chasqui._core.backoff import backoff_ms
from chasqui._core.buffer import CommandBuffer
from chasqui._core.column import Column
from chasqui._core.columns import ColumnBuilder
from chasqui._core.command import (
    common_name,
    evalsha,
    evalsha_jobs,
    pack_jobs,
    slices_by_size,
    xackdel,
    xadd_event,
    xadd_run_event,
    xreadgroup,
)
from chasqui._core.entry import EntryBuilder
from chasqui._core.envelope import (
    check_msgpack,
    decode_delayed_member,
    decode_envelope,
    encode_delayed_member,
    encode_envelope,
    encode_retry,
)
from chasqui._core.maps import pack_maps
from chasqui._core.options import draw_delayed_ids, job_keys, read_options
from chasqui._core.payload import pack, pack_rows, unpack
from chasqui._core.reply import Builder, ProtocolError, ReplyReader
from chasqui._core.typed import unpack_column
from chasqui._core.ulid import UlidFactory
from chasqui.model.job import job_factory
from tests.core.memory import assert_keeps_nothing
from tests.core.record_replies import frame

#: Even few calls take their time: the collector walks all that a run of tests has made.
pytestmark = pytest.mark.slow

NOW_MS = 1_794_797_194_811
BACKOFF = ("exponential" * 3, 2**40, 2**41, 1.5, 2**42)
ENVELOPE = encode_envelope("job-of-mine", b"\xc4\x01x", NOW_MS, 3, encode_retry(7, BACKOFF))
MEMBER = encode_delayed_member("a name that is longer than most", ENVELOPE)
BROKEN = ENVELOPE[:-1]
SHA = b"5" * 40
VALUE = {
    "to": "ada",
    "many": [2**40, -(2**40), 1.5, None, True, b"bytes", "ü" * 40],
    "in": {"x": {}},
}
SUBCLASSED = {
    type("Text", (str,), {})("key"): [
        type(name, (base,), {})(value)
        for name, base, value in (
            ("Int", int, 2**63),
            ("Float", float, 1.5),
            ("Bytes", bytes, b"x"),
        )
    ],
    "of its own": [collections.OrderedDict(a=1), bytearray(b"x"), memoryview(b"xyz")[::2]],
}
PACKED = msgpack.packb(VALUE)
ROWS = [{"name": "n", "data": VALUE}] * 3 + [None]
OPTIONS = [
    {"name": "n", "data": 1, "attempts": 3, "job_id": "i" * 40},
    {"name": "n", "data": 1, "delay_ms": 99},
    {"name": "n", "data": 1, "attempts": 10**12},
]
EMPTY: tuple[list[Any], list[Any]] = [None] * 3, [None] * 3
ZEROS = [0] * 3, [0] * 3
KNOWN: dict[tuple[int | None, int], tuple[bytes | None, object]] = {(3, id(None)): (b"r", None)}

BUFFER, ULIDS = CommandBuffer(), UlidFactory()
READER = ReplyReader()
STREAMS, RANGE = map(EntryBuilder, ("streams", "range"))
COLUMNS = ColumnBuilder([("name", "text", b"n")], ("entry_id", "payload", "envelope", "extra"))
PAIR = msgpack.packb({"a": ["x", "2026-11-18"], "d": "1E+2"}) * 2
PAIR_ENDS = struct.pack("=3i", 0, len(PAIR) // 2, len(PAIR))
_TEXT = ("element", "text", "string", True, 0, 0, [])
_DAY = ("element", "date", "date", True, 0, 0, [])
_PRICE = ("d", "decimal", "decimal(10,2)", True, 10, 2, [])
SHAPE: Any = ("p", "struct", "struct", True, 0, 0,
              [("a", "list", "array", True, 0, 0, [_TEXT]), _PRICE])  # fmt: skip
MISFIT: Any = ("p", "struct", "struct", True, 0, 0,
               [("a", "list", "array", True, 0, 0, [_DAY]), _PRICE])  # fmt: skip
NUMBERS = ("n", "int64", 0, b"\x01", bytes(16), None)

ROW = frame("d", ENVELOPE, "n", "a name of mine", "x", "of no meaning")
ENTRY = b"*2\r\n$15\r\n1794797194831-0\r\n" + ROW
CLAIMED = b"*4\r\n$15\r\n1794797194831-0\r\n" + ROW + b":300000\r\n:30000\r\n"
FAULTY = b"*2\r\n$3\r\n1-1\r\n" + frame("d", BROKEN)
NESTED = (
    b"*2\r\n%2\r\n$5\r\na key\r\n,1.25\r\n(123456789012345678901234567890\r\n"
    b"*2\r\n:1000000\r\n-ERR no\r\n~1\r\n=9\r\ntxt:hello\r\n"
)


def clean(write: Callable[[], object]) -> Callable[[], object]:
    def work() -> None:
        write()
        BUFFER.clear()

    return work


def read(data: bytes, builder: Builder | None = None) -> Callable[[], object]:
    def work() -> object:
        READER.feed(data)
        return READER.read(builder)

    return work


def broken(data: bytes, builder: Builder | None = None) -> Callable[[], object]:
    def work() -> object:
        reader = ReplyReader()
        reader.feed(data)
        return reader.read(builder)

    return work


def look(entry_data: bytes) -> Callable[[], object]:
    def work() -> object:
        READER.feed(b"*1\r\n" + entry_data)
        (entry,) = READER.read(RANGE)
        return (
            entry.job_id, entry.payload, entry.retry, entry.max_attempts, entry.created_at_ms,
            entry.attempt, entry.extra, entry.detail, repr(entry), entry.with_attempt(70_000),
        )  # fmt: skip

    return work


def run_event(entry: Any) -> None:
    xadd_run_event(BUFFER, b"k", b"completed", entry, NOW_MS, 70_000, 10**12)
    BUFFER.clear()


def parts() -> object:
    envelope = decode_envelope(ENVELOPE)
    return (
        envelope.id, envelope.payload, envelope.created_at_ms, envelope.attempt, envelope.retry,
        envelope.with_attempt(70_000),
    )  # fmt: skip


CALLS: dict[str, Callable[[], object]] = {
    "backoff": lambda: backoff_ms(9, 10**9, multiplier=1.5, max_delay_ms=10**8, jitter_ms=9),
    "backoff of huge numbers": lambda: backoff_ms(10**400, 10**400, multiplier=-(10**400)),
    "backoff of no number": lambda: backoff_ms("x", 1),
    "ulid": lambda: ULIDS.next(NOW_MS),
    "ulid out of time": lambda: ULIDS.next(2**48),
    "ulid factory": lambda: UlidFactory().next(NOW_MS),
    "encode envelope": lambda: encode_envelope("job", b"x" * 300, NOW_MS, 1, b"\xc0"),
    "encode envelope, wrong": lambda: encode_envelope("\ud800", b"", 1),
    "encode retry": lambda: encode_retry(70_000, BACKOFF),
    "encode retry, wrong": lambda: encode_retry(1, ("x" * 200, 1, 1, 1, "1")),
    "encode member": lambda: encode_delayed_member("some name", ENVELOPE),
    "decode envelope": parts,
    "decode envelope, broken": lambda: decode_envelope(BROKEN),
    "decode member": lambda: decode_delayed_member(MEMBER),
    "decode member, broken": lambda: decode_delayed_member(b"\x02\0\0\0\xff\xff"),
    "check": lambda: check_msgpack(bytearray(ENVELOPE)),
    "check, broken": lambda: check_msgpack(BROKEN),
    "pack": lambda: pack(VALUE, 1 << 20),
    "pack, wrong type": lambda: pack([VALUE, {"x": (1000,)}], 1 << 20),
    "pack, wrong key": lambda: pack([VALUE, {1000: 1}], 1 << 20),
    "pack, wrong text": lambda: pack(["\ud800" * 3], 1 << 20),
    "pack, wrong size": lambda: pack([b"x" * 100] * 20, 1000),
    "pack subclasses": lambda: pack([SUBCLASSED] * 3, 1 << 20),
    "pack much": lambda: pack(["x" * 100_000], 1 << 20),
    "pack_rows": lambda: pack_rows(ROWS, 0, 99, [], [], [], []),
    "read_options": lambda: read_options(OPTIONS, [0, 1, 2], 0, 99, KNOWN, *EMPTY, *ZEROS),
    "draw_delayed_ids": lambda: draw_delayed_ids(ULIDS, NOW_MS, [1, 0, 1], [None, None, "i" * 40]),
    "job_keys": lambda: job_keys([1, 2], ["i" * 40, "é"], b"a", b"b", b"c", b"d", b"e"),
    "job_keys, wrong": lambda: job_keys([1, 2], ["i" * 40, None], b"a", b"b", b"c", b"d", b"e"),
    "unpack": lambda: unpack(PACKED),
    "unpack, broken": lambda: unpack(PACKED[:-1]),
    "unpack, wrong key": lambda: unpack(b"\x92\xa5hello\x81\xcd\x40\x00\x01"),
    "unpack, wrong text": lambda: unpack(b"\x92\xa5hello\xa1\xff"),
    "command": clean(lambda: BUFFER.command("SET", b"k", bytearray(b"v"), 2**70, 1.5)),
    "command, wrong": lambda: BUFFER.command("SET", b"k" * 50, None),
    "buffer": lambda: CommandBuffer().command(b"x" * 5000),
    "bytes": clean(lambda: (BUFFER.command(b"PING"), bytes(BUFFER))),
    "evalsha_jobs": clean(
        lambda: evalsha_jobs(
            BUFFER, SHA, [b"k"], [300, "x"], ULIDS, NOW_MS, [b"\xc0"] * 2, due_ms=[10**12, 0]
        )
    ),
    "evalsha_jobs with ids and retries": clean(
        lambda: evalsha_jobs(
            *(BUFFER, SHA, [b"k"], [], ULIDS, NOW_MS, [ENVELOPE] * 3, ["a", "b", "c"]),
            *([None, "an id", None], [None, b"\xc0", None]),
        )
    ),
    "evalsha_jobs, wrong payload": lambda: evalsha_jobs(
        BUFFER, SHA, [b"k"], [], ULIDS, NOW_MS, [b"x" * 99, b"", None]
    ),
    "evalsha_jobs, wrong": lambda: evalsha_jobs(
        BUFFER, SHA, [b"k"], [], ULIDS, NOW_MS, [b"\xc0"], due_ms=["x"]
    ),
    "common_name": lambda: [
        common_name(names) for names in (["a" * 300, "".join(["a"] * 300)], ["a", "b"], [])
    ],
    "slices_by_size": lambda: slices_by_size([b"x"] * 9, 4, 2),
    "slices_by_size, wrong": lambda: slices_by_size([b"x", None], 1, 1),
    "pack_jobs": lambda: pack_jobs(
        ULIDS, NOW_MS, [ENVELOPE] * 2, [None, "id"], [None, b"\xc0"]
    ),
    "pack_jobs, wrong": lambda: pack_jobs(ULIDS, NOW_MS, [b"\xc0"] * 2, ["id", 1]),
    "pack_maps": lambda: pack_maps(
        2, [NUMBERS, ("s", "struct", 0, None, None, None, (2, [NUMBERS]))]
    ),
    "pack_maps, wrong": lambda: pack_maps(2, [NUMBERS, ("n", "int64", 9, None, bytes(16), None)]),
    "unpack_column": lambda: unpack_column(SHAPE, 2, 0, None, PAIR_ENDS, PAIR),
    "unpack_column, misfits": lambda: unpack_column(MISFIT, 2, 0, None, PAIR_ENDS, PAIR),
    "unpack_column, wrong": lambda: unpack_column(SHAPE, 2, 0, None, PAIR_ENDS[:8], PAIR),
    "instances": lambda: job_factory.make(
        2, ["a", "b"], "n", [[], {}], 0, NOW_MS, True, None, None
    ),
    "instances, wrong": lambda: job_factory.make(
        2, ["a"], "n", [[], {}], 0, NOW_MS, True, None, None
    ),
    "xadd_event": clean(
        lambda: xadd_event(BUFFER, b"k", b"active", "id", NOW_MS, "n", ["attempt", 1000])
    ),
    "xadd_event, wrong": lambda: xadd_event(BUFFER, b"k", b"e", "id", NOW_MS, "", ["f", None]),
    "xadd_run_event": lambda: (READER.feed(b"*1\r\n" + ENTRY), run_event(READER.read(RANGE)[0])),
    "xackdel": clean(lambda: xackdel(BUFFER, b"k", b"g", [b"1-1"] * 9)),
    "xackdel, wrong": lambda: xackdel(BUFFER, b"k", b"g", [b"1-1", None]),
    "evalsha": clean(lambda: evalsha(BUFFER, SHA, [b"k"], [1000, "x"])),
    "xreadgroup": clean(
        lambda: xreadgroup(
            BUFFER, b"g", b"c", b"k", count=1000, block_ms=5000, claim_min_idle_ms=30_000
        )
    ),
    "read columns": lambda: (read(b"*2\r\n" + ENTRY + FAULTY, COLUMNS)(), COLUMNS.take()),
    "read columns, broken": broken(b"*3\r\n" + ENTRY + FAULTY + b"*2\r\n:1\r\n", COLUMNS),
    "column": lambda: Column("n", "text", b"n"),
    "read": read(NESTED),
    "read an error": read(b"-NOGROUP no such group\r\n"),
    "read streams": read(b"*1\r\n*2\r\n$3\r\nkey\r\n*2\r\n" + CLAIMED + ENTRY, STREAMS),
    "read streams of RESP3": read(b"%1\r\n$3\r\nkey\r\n*2\r\n" + CLAIMED + FAULTY, STREAMS),
    "read a range with a nil": read(b"*2\r\n*-1\r\n" + ENTRY, RANGE),
    "look at an entry": look(ENTRY),
    "look at a broken entry": look(FAULTY),
    "read a broken reply": broken(b"*3\r\n%1\r\n$5\r\na key\r\n*1\r\n+x\r\n:300\r\n@"),
    "read a broken reply, by hiredis": broken(b"*2\r\n$5\r\nhello\r\n:x\r\n"),
    "read a reply in another shape": broken(b"*2\r\n" + ENTRY + b":1\r\n", RANGE),
    "read entries and a fault": broken(b"*9\r\n" + ENTRY + FAULTY + b"*2\r\n:1\r\n", RANGE),
    "drop a reader": broken(b"*2\r\n" + ENTRY + b"*2\r\n$3\r\n1-1\r\n", RANGE),
    "drop a reader with a chunk": lambda: ReplyReader().feed(b"x" * 100_000),
}  # fmt: skip


def attempt(name: str) -> Callable[[], object]:
    """The call; one that must fail must fail, any other must not."""
    work = CALLS[name]
    if not re.search("wrong|broken|no number|out of|another|and a fault", name):
        return work

    def fail() -> None:
        try:
            work()
        except (TypeError, ValueError, OverflowError, ProtocolError):
            return
        raise AssertionError(f"{name}: nothing was raised")

    return fail


@pytest.mark.parametrize(
    "calls",
    [
        # The least that malloc gives, lost in each call, is twice what the allocator may keep.
        pytest.param(200_000, id="2e5", marks=pytest.mark.timeout(120)),
        pytest.param(1_000_000, id="1e6", marks=[pytest.mark.long, pytest.mark.timeout(300)]),
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_many_calls_keep_nothing(name: str, calls: int):
    assert_keeps_nothing(attempt(name), calls)


ARGUMENTS: dict[str, tuple[Callable[..., object], list[Any]]] = {
    "command": (BUFFER.command, [b"a" * 40, "t" * 40, 2**70, 1e300, bytearray(b"x")]),
    "evalsha_jobs": (
        lambda *a: evalsha_jobs(
            BUFFER, SHA, [a[0]], [a[1]], ULIDS, NOW_MS, [a[2]], a[3], [a[4]], [a[5]], [a[6]]
        ),
        [b"key" * 9, "x" * 40, b"p" * 40, "n" * 40, "i" * 40, b"\xc0" * 2, 10**12],
    ),
    "xadd_event": (
        lambda *a: xadd_event(BUFFER, *a),
        [b"key" * 9, b"event" * 9, "id" * 20, 10**12, "name" * 9, ["a", 10**12]],
    ),
    "xackdel": (lambda *a: xackdel(BUFFER, *a), [b"key" * 9, b"group" * 9, [b"1-1" * 9]]),
    "xreadgroup": (
        lambda *a: xreadgroup(BUFFER, *a[:3], count=a[3], last_id=a[4]),
        [b"group" * 9, b"consumer" * 9, b"key" * 9, 10**12, b"0-0" * 9],
    ),
    "encode_envelope": (encode_envelope, ["id" * 20, b"p" * 40, 10**12, 10**9, b"\xc0" * 2]),
    "encode_retry": (encode_retry, [10**9, BACKOFF]),
    "encode_delayed_member": (encode_delayed_member, ["name" * 9, b"e" * 40]),
    "decode_envelope": (decode_envelope, [ENVELOPE]),
    "decode_delayed_member": (decode_delayed_member, [MEMBER]),
    "check_msgpack": (check_msgpack, [ENVELOPE]),
    "backoff": (lambda *a: backoff_ms(*a), [10**9, 10**12]),
    "ulid": (ULIDS.next, [10**12]),
    "feed": (lambda a: (READER.feed(a), READER.read()), [b"$3\r\nabc\r\n"]),
    "builder": (lambda a: (READER.feed(b"*1\r\n" + ENTRY), READER.read(a)), [RANGE]),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_given_back(name: str):
    call, arguments = ARGUMENTS[name]
    counted = [*arguments, *(part for a in arguments if isinstance(a, list) for part in a)]
    for _ in range(3):
        call(*arguments)
    BUFFER.clear()
    gc.collect()
    before = [sys.getrefcount(argument) for argument in counted]
    for _ in range(100):
        call(*arguments)
    BUFFER.clear()
    gc.collect()
    assert [sys.getrefcount(argument) for argument in counted] == before
    for wrong in range(len(arguments)):
        changed = [*arguments]
        changed[wrong] = object()
        for _ in range(100):
            with pytest.raises((TypeError, ValueError)):
                call(*changed)
    del changed
    gc.collect()
    assert [sys.getrefcount(argument) for argument in counted] == before
