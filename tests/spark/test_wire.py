"""Pages become columns: checked against plain Python, and against bytes that are not what they
should be."""

import json
import random
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest

from chasqui._core.envelope import encode_delayed_member, encode_envelope, encode_retry
from chasqui._core.reply import ReplyReader
from chasqui._core.ulid import UlidFactory
from chasqui.spark.options import Options
from chasqui.spark.reading.decoding import EventDecoder, JobDecoder, delayed_batch
from chasqui.spark.reading.shaping import CorruptEntryError, Shaper
from tests.spark.direct import schema_of, struct

EVENTS = Options.parse({"queue": "q", "table": "events"}, "r")
DELAYED = Options.parse({"queue": "q", "table": "delayed"}, "r")


def batch_of(decoder: EventDecoder | JobDecoder, page: list[Any], held: Any = None) -> Any:
    """A page of XRANGE, through the core and the decoder; of those that are held, if given."""
    reply = b"*%d\r\n" % len(page)
    for entry_id, fields in page:
        reply += b"*2\r\n$%d\r\n%b\r\n*%d\r\n" % (len(entry_id), entry_id, len(fields))
        reply += b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in fields)
    reader, builder = ReplyReader(), decoder.builder()
    reader.feed(reply)
    assert reader.read(builder) == (len(page), page[-1][0])
    if isinstance(decoder, JobDecoder):
        batch = decoder.batch("q", builder.take(), held, only_held=True)
    else:
        batch = decoder.batch("q", builder.take())
    batch.validate(full=True)
    return batch


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms // 1000, UTC).replace(microsecond=ms % 1000 * 1000)


def test_events_are_what_plain_python_reads_out_of_them():
    rng = random.Random(7)
    ulids = UlidFactory()
    page, expected = [], []
    for i in range(300):
        ms = 1_794_797_194_000 + i
        job_id = ulids.next(ms - 50) if i % 3 else f"own-{i}"
        fields: dict[str, Any] = {"e": rng.choice(["active", "completed"]), "id": job_id}
        fields["ts"] = ms + 2
        if i % 2:
            fields["n"] = "mäil"
        if i % 5:
            fields["attempt"] = i
        if i % 7 == 0:
            fields |= {"duration_us": i * 1000, "reason": "boom", "later": "new", "more": "x"}
        flat = [str(part).encode() for pair in fields.items() for part in pair]
        page.append([b"%d-%d" % (ms, i), flat])
        expected.append(
            {
                "queue": "q",
                "entry_id": f"{ms}-{i}",
                "entry_ts": at(ms),
                "event": fields["e"],
                "job_id": job_id,
                "ts": at(ms + 2),
                "name": fields.get("n"),
                "attempt": fields.get("attempt"),
                "duration_us": fields.get("duration_us"),
                "backoff_ms": None,
                "delay_ms": None,
                "reason": fields.get("reason"),
                "job_created_at": at(ms - 50) if i % 3 else None,
                "extra": [("later", "new"), ("more", "x")] if i % 7 == 0 else [],
            }
        )
    assert batch_of(EventDecoder(schema_of(EVENTS)), page).to_pylist() == expected


def test_an_odd_value_costs_itself_and_not_its_page():
    page = [
        [b"1-0", [b"e", b"\xff\xfe", b"id", b"a", b"ts", b"soon", b"attempt", b"9" * 30]],
        [b"2-0", [b"e", b"active", b"id", b"b", b"ts", b"5", b"attempt", b"2"]],
        [b"3-0", [b"e", b"drained", b"id", b"", b"ts", b"6"]],
    ]
    rows = batch_of(EventDecoder(schema_of(EVENTS)), page).to_pylist()
    assert [row["event"] for row in rows] == ["\ufffd\ufffd", "active", "drained"]
    assert [row["ts"] for row in rows] == [None, at(5), at(6)]
    assert [row["attempt"] for row in rows] == [None, 2, None]
    assert rows[2]["job_id"] == ""


def test_only_the_wanted_columns_are_there():
    decoder = EventDecoder(schema_of(EVENTS, "job_created_at", "event"))
    page = [[b"1-0", [b"e", b"active", b"id", b"01ARZ3NDEKTSV4RRFFQ69G5FAV", b"x", b"y"]]]
    (row,) = batch_of(decoder, page).to_pylist()
    assert list(row) == ["job_created_at", "event"]
    assert row["job_created_at"] == at(1_469_922_850_259)


def test_when_a_job_was_created_is_told_by_its_id_or_by_a_field():
    ulid, own = b"01ARZ3NDEKTSV4RRFFQ69G5FAV", b"order-7"
    page = [
        [b"1-0", [b"e", b"active", b"id", ulid, b"ts", b"5", b"attempt", b"1"]],
        [b"2-0", [b"e", b"active", b"id", own, b"ts", b"5", b"attempt", b"1", b"created", b"7000"]],
        [b"3-0", [b"e", b"active", b"id", own, b"ts", b"5", b"attempt", b"1", b"created", b"soon"]],
        [b"4-0", [b"e", b"drained", b"id", b"", b"ts", b"6"]],
    ]
    rows = batch_of(EventDecoder(schema_of(EVENTS)), page).to_pylist()
    created = [row["job_created_at"] for row in rows]
    assert created == [at(1_469_922_850_259), at(7000), None, None]
    assert all(row["extra"] == [] for row in rows)
    (first, *_) = batch_of(EventDecoder(schema_of(EVENTS, "event")), page).to_pylist()
    assert list(first) == ["event"]


# ── Jobs ────────────────────────────────────────────────────────────────────────────────────────


def entries(*rows: list[Any]) -> list[Any]:
    """A page of these jobs."""
    return [[b"%d-0" % (1000 + i), fields] for i, fields in enumerate(rows)]


GOOD = encode_envelope("job-1", msgpack.packb({"n": 1, "to": "ada"}), 1_700_000_000_000, 2)
RETRY = encode_envelope(
    "job-2",
    msgpack.packb({"n": 2, "to": None}),
    1_700_000_000_001,
    0,
    encode_retry(5, ("exponential", 100, None, 2.5, 7)),
)
PAGE = [
    [b"d", GOOD, b"n", b"mail"],
    [b"d", b"\x93garbage", b"n", b"mail"],
    [b"n", b"mail"],
    [b"d", RETRY],
]


def decoder(*columns: str, **given: str) -> JobDecoder:
    options = Options.parse({"queue": "q", **given}, "r")
    return JobDecoder(options, schema_of(options, *columns))


def test_jobs_that_cannot_be_read_keep_their_bytes_aside():
    rows = batch_of(decoder(), entries(*PAGE)).to_pylist()
    assert [row["job_id"] for row in rows] == ["job-1", None, None, "job-2"]
    assert [row["_corrupt"] for row in rows] == [None, b"\x93garbage", b"", None]
    assert rows[0]["payload"] == msgpack.packb({"n": 1, "to": "ada"})
    assert (rows[0]["attempt"], rows[0]["name"]) == (2, "mail")
    assert rows[0]["created_at"] == at(1_700_000_000_000)
    assert rows[0]["retry"] is None
    assert rows[3]["retry"] == {
        "max_attempts": 5,
        "backoff_kind": "exponential",
        "delay_ms": 100,
        "max_delay_ms": None,
        "multiplier": 2.5,
        "jitter_ms": 7,
    }
    assert (rows[3]["name"], rows[1]["attempt"]) == ("", None)


def test_they_are_dropped_or_fail_if_asked():
    rows = batch_of(decoder(parseMode="DROPMALFORMED"), entries(*PAGE)).to_pylist()
    assert [row["job_id"] for row in rows] == ["job-1", "job-2"]
    with pytest.raises(CorruptEntryError, match="jobs of queue 'q' cannot be read: 1001-0"):
        batch_of(decoder(parseMode="failfast"), entries(*PAGE))


def test_payloads_come_as_json_or_as_a_struct():
    page = [
        *PAGE,
        [b"d", encode_envelope("job-3", msgpack.packb(["no", "map", b"\x00\xff"]), 1)],
        [b"d", encode_envelope("job-4", msgpack.packb({"n": "seven"}), 1)],
        [b"d", encode_envelope("job-5", b"\xc1", 1)],
    ]
    rows = batch_of(decoder("job_id", "payload", "_corrupt", payloadFormat="json"), entries(*page))
    texts = rows.column("payload").to_pylist()
    assert json.loads(texts[0]) == {"n": 1, "to": "ada"}
    assert json.loads(texts[4]) == ["no", "map", "AP8="]
    assert texts[6] is None
    assert rows.column("_corrupt")[6].as_py() == page[6][1]
    options = Options.parse({"queue": "q", "payloadSchema": "n bigint, to string"}, "r")
    typed = JobDecoder(
        options, struct(job_id="string", payload="struct<n: bigint, to: string>", _corrupt="binary")
    )
    rows = batch_of(typed, entries(*page)).to_pylist()
    assert rows[0]["payload"] == {"n": 1, "to": "ada"}
    assert [row["payload"] for row in rows[4:]] == [None, None, None]
    assert [row["_corrupt"] for row in rows[4:]] == [fields[1] for fields in page[4:]]


def test_whoever_reads_is_told_why_a_row_is_corrupt():
    told = {
        "1001-0": "envelope: an envelope has at least 4 elements (at byte 0)",
        "1002-0": "the entry holds no envelope",
        "1004-0": "payload: expected struct, got list",
    }
    page = entries(*PAGE, [b"d", encode_envelope("job-3", msgpack.packb(["no", "map"]), 1)])
    for mode in ("PERMISSIVE", "DROPMALFORMED"):
        options = Options.parse({"queue": "q", "payloadSchema": "n bigint", "parseMode": mode}, "r")
        typed = JobDecoder(options, struct(job_id="string", payload="struct<n: bigint>"))
        rows = batch_of(typed, page).num_rows
        assert (rows, typed.corrupt) == (5 if mode == "PERMISSIVE" else 2, told)
        batch_of(typed, entries(PAGE[0]))
        assert typed.corrupt == {}


def test_an_entry_that_somebody_else_holds_is_not_judged():
    held = {b"1000-0": ("etl", 1, 5), b"1001-0": ("etl", 1, 5)}
    for mode, ids in (("PERMISSIVE", ["job-1", None]), ("DROPMALFORMED", ["job-1"])):
        typed = decoder("job_id", "_corrupt", parseMode=mode)
        batch = batch_of(typed, entries(*PAGE), held)
        assert batch.column("job_id").to_pylist() == ids
        assert list(typed.corrupt) == ["1001-0"]
    del held[b"1001-0"]
    assert batch_of(decoder(parseMode="FAILFAST"), entries(*PAGE), held).num_rows == 1


def test_delayed_members_are_read_the_same_way():
    members = [
        (encode_delayed_member("mail", GOOD), 1_800_000_000_000.0),
        (b"\xff\xff\xff\xffx", 1.0),
        (encode_delayed_member("", b"\x93garbage"), 2.0),
    ]
    rows = delayed_batch(Shaper(DELAYED, schema_of(DELAYED)), "q", members).to_pylist()
    assert [row["job_id"] for row in rows] == ["job-1", None, None]
    assert [row["run_at"] for row in rows] == [at(1_800_000_000_000), at(1), at(2)]
    assert [row["_corrupt"] for row in rows[1:]] == [members[1][0], members[2][0]]


def test_times_that_cannot_be_are_null():
    far = encode_envelope("far", b"\xc0", 2**63)
    rows = batch_of(decoder("created_at", "job_id"), entries([b"d", far])).to_pylist()
    assert rows == [{"created_at": None, "job_id": "far"}]
