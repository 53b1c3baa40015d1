"""Bytes captured from another implementation of the wire format, reproduced and read back."""

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import evalsha_jobs, xadd_event
from chasqui._core.entry import EntryBuilder
from chasqui._core.envelope import (
    check_msgpack,
    decode_delayed_member,
    decode_envelope,
    encode_delayed_member,
    encode_envelope,
    encode_retry,
)
from chasqui._core.reply import ReplyReader
from chasqui._core.ulid import UlidFactory
from tests.core.record_replies import frame

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())


def from_hex(text: str) -> bytes:
    """The bytes of a hex string in which a long run of one byte is written as `<run:62:70000>`."""
    return bytes.fromhex(re.sub(r"<run:(..):(\d+)>", lambda run: run[1] * int(run[2]), text))


def retry_of(spec: list[Any] | None) -> tuple[Any, Any] | None:
    if spec is None:
        return None
    return spec[0], None if spec[1] is None else tuple(spec[1])


def retry_bytes(spec: list[Any] | None) -> bytes | None:
    retry = retry_of(spec)
    return None if retry is None else encode_retry(*retry)


def read_one(data: bytes, shape: str) -> Any:
    reader = ReplyReader()
    reader.feed(data)
    return reader.read(EntryBuilder(shape))


@pytest.mark.parametrize("job", VECTORS["jobs"], ids=lambda job: job["id"])
def test_job_envelope(job: dict[str, Any]):
    envelope, payload = from_hex(job["d_hex"]), from_hex(job["payload_hex"])
    retry = retry_bytes(job["retry"])
    assert (
        encode_envelope(job["id"], payload, job["created_at_ms"], job["attempt"], retry) == envelope
    )
    decoded = decode_envelope(envelope)
    assert (decoded.id, decoded.payload) == (job["id"], payload)
    assert (decoded.created_at_ms, decoded.attempt) == (job["created_at_ms"], job["attempt"])
    assert decoded.retry == retry_of(job["retry"])
    assert decoded.with_attempt(job["attempt"]) == envelope
    check_msgpack(decoded.payload)


@pytest.mark.parametrize("job", VECTORS["jobs"], ids=lambda job: job["id"])
def test_job_entry_is_added_and_read_back(job: dict[str, Any]):
    buffer = CommandBuffer()
    envelope, payload = from_hex(job["d_hex"]), from_hex(job["payload_hex"])
    answer = evalsha_jobs(
        *(buffer, b"5" * 40, [b"key"], [], UlidFactory(), job["created_at_ms"], [payload]),
        *(job["name"], [job["id"]], [retry_bytes(job["retry"])]),
    )
    fields = [b"d", envelope]
    if "n" in job["fields"]:
        fields += [b"n", job["n"].encode()]
    assert answer == [job["id"]]
    assert [field.decode() for field in fields[::2]] == job["fields"]
    assert bytes(buffer) == frame("EVALSHA", b"5" * 40, 1, b"key", envelope, job["name"])

    # A command and a reply are framed alike: what was added is an entry's list of fields.
    (entry,) = read_one(b"*1\r\n*2\r\n$3\r\n1-1\r\n" + frame(*fields), "range")
    assert (entry.fault, entry.name, entry.extra) == (None, job["name"], None)
    assert (entry.envelope, entry.job_id, entry.payload) == (envelope, job["id"], payload)
    assert (entry.created_at_ms, entry.attempt) == (job["created_at_ms"], job["attempt"])
    assert entry.retry == retry_of(job["retry"])


@pytest.mark.parametrize("delayed", VECTORS["delayed"], ids=lambda delayed: delayed["name"])
def test_delayed_member(delayed: dict[str, Any]):
    member = from_hex(delayed["member_hex"])
    id, payload, created_at_ms, attempt, *retry = delayed["envelope"]
    payload = from_hex(payload["$hex"])
    envelope = encode_envelope(
        id, payload, created_at_ms, attempt, retry_bytes(retry[0]) if retry else None
    )
    assert encode_delayed_member(delayed["name"], envelope) == member
    assert decode_delayed_member(member) == (delayed["name"], envelope)
    assert decode_envelope(envelope).retry == (retry_of(retry[0]) if retry else None)

    buffer = CommandBuffer()
    evalsha_jobs(
        *(buffer, b"5" * 40, [b"key"], [7], UlidFactory(), created_at_ms, [payload]),
        *(delayed["name"], [id], [retry_bytes(retry[0]) if retry else None], [delayed["score"]]),
    )
    job = [envelope, delayed["name"], delayed["score"]]
    assert bytes(buffer) == frame("EVALSHA", b"5" * 40, 1, b"key", 7, *job)


def test_cancel_index_holds_the_delayed_member():
    index = VECTORS["delayed_idempotent_keys"]["{chasqui:v}:didx:did"]
    assert index["value_hex"] in [delayed["member_hex"] for delayed in VECTORS["delayed"]]


@pytest.mark.parametrize("dead", VECTORS["dlq"], ids=lambda dead: dead["reason"])
def test_dlq_entry(dead: dict[str, Any]):
    # The one that was too large is not kept here; what it held does not matter.
    envelope = b"\xc4" * 2_000_000 if "bytes>" in dead["d"] else bytes.fromhex(dead["d"])
    fields = {**dead, "d": envelope}
    assert [*fields] == [
        name for name in ("d", "n", "source_id", "reason", "detail") if name in fields
    ]
    flat = [part for pair in fields.items() for part in pair]
    (entry,) = read_one(b"*1\r\n*2\r\n$3\r\n1-1\r\n" + frame(*flat), "range")
    assert entry.envelope == envelope
    assert entry.extra[b"reason"].decode() == dead["reason"]
    assert entry.fault == {
        "malformed": "decode_failed",  # the DLQ keeps an empty `d` where there was none
        "oversize_payload": "oversize_payload",
        "decode_failed": "decode_failed",
    }.get(dead["reason"])


@pytest.mark.parametrize("event", VECTORS["events"], ids=lambda event: event["e"])
def test_event_entry(event: dict[str, str]):
    buffer = CommandBuffer()
    rest = [(name, text) for name, text in event.items() if name not in ("e", "id", "ts", "n")]
    xadd_event(
        *(buffer, b"key", event["e"].encode(), event["id"], int(event["ts"]), event.get("n", "")),
        [part for pair in rest for part in pair],
    )
    flat = [part for pair in event.items() for part in pair]
    assert bytes(buffer) == frame("XADD", b"key", "*", *flat)


def test_result_is_one_strict_msgpack_value():
    for result in VECTORS["result"]:
        check_msgpack(from_hex(result["value_hex"]))


@pytest.mark.parametrize("repeat", VECTORS["repeat"], ids=lambda repeat: repeat["key"])
def test_repeat_spec_is_strict_msgpack_around_a_payload_in_two_bins(repeat: dict[str, Any]):
    spec = from_hex(repeat["hash"]["spec"])
    check_msgpack(spec)
    outer = msgpack.unpackb(spec)[3]
    check_msgpack(outer)
    check_msgpack(msgpack.unpackb(outer))
