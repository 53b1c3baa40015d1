"""Entries of every kind arrive: good ones run, bad ones are buried for their reason."""

import asyncio
import hashlib
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import msgpack
import pytest

from chasqui import Job
from chasqui._core.entry import Entry
from chasqui._core.envelope import encode_retry
from chasqui.consuming.takeovers import Takeovers
from chasqui.metrics import DlqRouted, JobOutcome
from chasqui.model.keys import Keys
from chasqui.queue import Queue
from chasqui.scripts import settling
from chasqui.transport.request import Script
from tests.consuming.conftest import Redis, Running, at_rest, envelope, until

Start = Callable[..., Running]
Read = Callable[[], Awaitable[list[dict[bytes, bytes]]]]
AddRaw = Callable[..., Awaitable[bytes]]


async def fine(job: Job) -> None:
    pass


async def test_without_envelope(start: Start, add_raw: AddRaw, dead: Read, events: Read) -> None:
    entry_id = await add_raw(None, b"name")
    running = start(fine)
    assert await running.next(DlqRouted) == DlqRouted("malformed", 0, "name")
    (buried,) = await dead()
    assert buried[b"d"] == b""
    assert buried[b"n"] == b"name"
    assert buried[b"source_id"] == entry_id
    assert buried[b"reason"] == b"malformed"
    assert buried[b"detail"] == b"missing or non-bytes payload field"
    assert buried[b"attempts"] == b"0"
    assert b"error" not in buried
    (event,) = await until(events, "it is told")
    assert event[b"e"] == b"dlq"
    assert (event[b"id"], event[b"attempt"]) == (b"", b"0")


@pytest.mark.fault(40)
async def test_oversize_is_not_decoded(start: Start, add_raw: AddRaw, dead: Read) -> None:
    sent = envelope("x" * 2000)
    await add_raw(sent, b"name")
    running = start(fine, max_payload_bytes=1000)
    assert await running.next(DlqRouted) == DlqRouted("oversize_payload", 0, "name")
    (buried,) = await dead()
    assert buried[b"d"] == sent
    assert not running.metrics.all(JobOutcome)


async def test_runs_beyond_the_jobs_limit(start: Start, add_raw: AddRaw, dead: Read) -> None:
    await add_raw(envelope(attempt=3, retry=encode_retry(3)), b"own limit")
    await add_raw(envelope(attempt=25), b"the worker's")
    await add_raw(envelope(attempt=0, retry=encode_retry(0)), b"none at all")
    running = start(fine)
    await running.buried(3)
    found = {one[b"n"]: (one[b"reason"], one[b"attempts"]) for one in await dead()}
    assert found == {
        b"own limit": (b"retries_exhausted", b"3"),
        b"the worker's": (b"retries_exhausted", b"25"),
        b"none at all": (b"retries_exhausted", b"0"),
    }
    assert not running.metrics.all(JobOutcome)


@pytest.mark.parametrize(("deliveries", "runs"), [(2, True), (3, False)])
async def test_deliveries_have_a_budget_of_their_own(
    start: Start,
    add_raw: AddRaw,
    dead: Read,
    redis: Redis,
    keys: Keys,
    deliveries: int,
    runs: bool,
) -> None:
    """A job with one attempt whose worker died was not run: it has three deliveries."""
    entry_id = await add_raw(envelope(retry=encode_retry(1)))
    await redis("XGROUP", "CREATE", keys.stream, "default", "0")
    await redis("XREADGROUP", "GROUP", "default", "dead", "STREAMS", keys.stream, ">")
    claim = ("XCLAIM", keys.stream, "default", "dead", 0, entry_id)
    await redis(*claim, "IDLE", 100_000, "RETRYCOUNT", deliveries, "JUSTID")
    running = start(fine)
    if runs:
        await running.completed(1)
        assert await dead() == []
    else:
        await running.buried(1)
        (buried,) = await dead()
        assert (buried[b"reason"], buried[b"detail"]) == (b"retries_exhausted", b"worker lost")
        assert buried[b"attempts"] == b"0"


async def test_a_process_of_the_same_name_takes_up_what_its_predecessor_had(
    queue: Queue, start: Start, redis: Redis, keys: Keys, dead: Read
) -> None:
    """At once, not after the lease; and each time it counts as one more delivery."""
    await queue.add("n", "poison")
    await redis("XGROUP", "CREATE", keys.stream, "default", "0")
    await redis("XREADGROUP", "GROUP", "default", "fixed", "STREAMS", keys.stream, ">")
    running = start(fine, consumer_id="fixed", max_deliveries=1, claim_min_idle_ms=60_000)
    await running.buried(1)
    assert (await dead())[0][b"detail"] == b"worker lost"


def poison() -> list[tuple[bytes | None, bytes, bytes]]:
    """Bad entries: envelope, name, reason."""
    good = envelope({"a": 1})
    return [
        (None, b"empty", b"malformed"),
        (b"", b"no bytes", b"decode_failed"),
        (b"\xc1", b"no msgpack", b"decode_failed"),
        (good[:-1], b"cut", b"decode_failed"),
        (b"\x91" * 100_000, b"nesting bomb", b"decode_failed"),
        (b"\xdd\xff\xff\xff\xff", b"length bomb", b"decode_failed"),
        (msgpack.packb([b"\xff\xfe", b"x", 1, 0]), b"id is no text", b"decode_failed"),
        (b"\x94\xa2\xff\xfe" + b"\xc4\x01\xc0\x01\x00", b"id is no UTF-8", b"decode_failed"),
        (msgpack.packb({"id": "x"}), b"a map", b"decode_failed"),
        (envelope(payload=b"\xc1"), b"payload is no msgpack", b"decode_failed"),
        (envelope(payload=b"\x91" * 2000), b"payload is a bomb", b"decode_failed"),
        (envelope(payload=b"\x81\x01\x01"), b"keys are numbers", b"decode_failed"),
        (envelope(payload=b""), b"payload is empty", b"decode_failed"),
        (b"x" * ((1 << 20) + 1), b"oversize", b"oversize_payload"),
    ]


@pytest.mark.fault(41)
@pytest.mark.fault(42)
@pytest.mark.fault(43)
@pytest.mark.both_loops
async def test_poison_among_good_jobs(
    start: Start, add_raw: AddRaw, redis: Redis, keys: Keys, dead: Read
) -> None:
    seen: list[str] = []

    async def handler(job: Job) -> None:
        seen.append(job.id)

    bad = poison() * 3
    random.Random(7).shuffle(bad)
    names = [b"good", b"\xff\xfe bad name \xff", "näme".encode(), b"x" * 300, b""]
    for i, (data, name, _) in enumerate(bad):
        await add_raw(data, name)
        await add_raw(envelope(i, job_id=f"good-{i}"), names[i % len(names)])
    running = start(handler)
    await running.completed(len(bad))
    await running.buried(len(bad))
    assert sorted(seen) == sorted(f"good-{i}" for i in range(len(bad)))
    found = Counter((one[b"n"], one[b"reason"]) for one in await dead())
    assert found == Counter((name, reason) for _, name, reason in bad)
    await until(lambda: at_rest(redis, keys), "nothing is left")


@pytest.mark.fault(43)
async def test_a_job_with_an_odd_name_can_be_retried_and_buried(
    start: Start, add_raw: AddRaw, dead: Read
) -> None:
    async def handler(job: Job) -> None:
        raise ValueError

    retry = encode_retry(2, ("fixed", 1, None, None, 0))
    await add_raw(envelope(retry=retry), b"\xff" * 300)
    await add_raw(envelope(retry=encode_retry(2, ("newer kind", 1, None, None, 0))), b"kind")
    running = start(handler)
    await running.buried(2)
    assert {one[b"reason"] for one in await dead()} == {b"retries_exhausted"}


#: reclaim.lua, but that it passes over what was deleted, as a read with CLAIM does.
UNSWEPT = b"""
local key, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local found = {}
for _, held in ipairs(redis.call('XPENDING', key, group, 'IDLE', ARGV[3], '-', '+', ARGV[4])) do
  if #redis.call('XRANGE', key, held[1], held[1]) > 0 then
    local entry = redis.call('XCLAIM', key, group, consumer, ARGV[3], held[1])[1]
    found[#found + 1] = {entry[1], entry[2], held[3], held[4]}
  end
end
return found
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_swept",
    [
        pytest.param(True, marks=pytest.mark.fault(27)),
        pytest.param(False, marks=pytest.mark.fault(27, control=True)),
    ],
)
async def test_trimmed_while_pending_is_reported_and_swept_out(
    queue: Queue,
    start: Start,
    redis: Redis,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_swept: bool,
) -> None:
    monkeypatch.setattr("chasqui.consuming.takeovers.SWEEP_S", 0.2)
    monkeypatch.setattr("chasqui.consuming.takeovers.LOOK_S", 0.2)
    if not is_swept:
        sha = hashlib.sha1(UNSWEPT, usedforsecurity=False).hexdigest().encode()
        monkeypatch.setattr(settling, "RECLAIM", Script("unswept", UNSWEPT, sha))
    looks: list[int] = []
    take_over = Takeovers._take_over

    async def look(self: Takeovers, *arguments: Any) -> list[Entry | None]:
        entries = await take_over(self, *arguments)
        looks.append(len(entries))
        return entries

    monkeypatch.setattr(Takeovers, "_take_over", look)
    await queue.add_bulk([{"name": "n", "data": i} for i in range(20)])
    await redis("XGROUP", "CREATE", keys.stream, "default", "0")
    await redis("XREADGROUP", "GROUP", "default", "dead", "STREAMS", keys.stream, ">")
    await redis("XTRIM", keys.stream, "MAXLEN", 1)
    running = start(fine, claim_min_idle_ms=300, read_block_ms=50)
    await running.completed(1)
    done = len(looks)  # the leases of the others are over as well

    async def is_over() -> bool:
        if await redis("XLEN", keys.stream):
            return False  # what ran is not acknowledged yet
        return len(looks) > done + 2 or await at_rest(redis, keys)

    await until(is_over, "nothing is left pending, or it is passed over")
    with nullcontext() if is_swept else pytest.raises(AssertionError, match="19 stick"):
        stuck = (await redis("XPENDING", keys.stream, "default"))[0]
        assert stuck == 0, f"{stuck} stick"
        told = re.compile(r"(\d+) entries were deleted from the stream while they were pending")
        counts = [told.search(record.getMessage()) for record in caplog.records]
        assert sum(int(found[1]) for found in counts if found) == 19  # by one look, or by several
    await queue.add("n", "later")
    await running.completed(2)


@pytest.mark.fault(27)
async def test_trimmed_while_it_runs(
    queue: Queue, start: Start, redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chasqui.consuming.takeovers.SWEEP_S", 0.2)
    gate = asyncio.Event()
    begun = asyncio.Event()

    async def handler(job: Job) -> Any:
        begun.set()
        await gate.wait()

    running = start(handler, claim_min_idle_ms=300, read_block_ms=50)
    await queue.add("n", None)
    await running.fact(begun.wait())
    await redis("XTRIM", keys.stream, "MAXLEN", 0)
    gate.set()
    await running.completed(1)
    await until(lambda: at_rest(redis, keys), "nothing is left pending")
