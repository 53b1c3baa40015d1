"""`chasqui job`: where one job is, and what is known of it.

Jobs are not indexed by id in the stream and the dead-letter queue: both are gone through, in the
order in which the id says that it is likely to be found.
"""

from typing import Annotated, Any

import typer

from chasqui import dlq, events, payload
from chasqui._core.entry import Entry, EntryBuilder
from chasqui._core.envelope import EnvelopeError, decode_delayed_member, decode_envelope
from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, Group, QueueName, RedisUrl
from chasqui.cli.output import at_ms, cell, show
from chasqui.cli.run import on_server
from chasqui.managing.consumers import HANDED_BACK_MS
from chasqui.errors import PayloadError
from chasqui.events.log import QueueEvent, parse_event
from chasqui.model.job import drawn_ms
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.timed.repeatables import scored
from chasqui.transport.request import Effect, Plan, commands

_PAGE = 1000
# It is shown, not run: whatever its size.
_ANY_SIZE = 1 << 40
#: How far the clocks of a producer and of the server may be apart.
_SKEW_MS = 60_000

Found = dict[str, Any]


def job(
    queue: QueueName,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The job's id.")],
    redis_url: RedisUrl = None,
    group: Group = DEFAULT_GROUP,
    as_json: AsJson = False,
) -> None:
    """Show one job: its state, data, attempts, and the events that are left of it.

    States: waiting, also if a worker handed it back; pending, a worker has it and renewed its lease
    idle_ms ago; delayed, until it is due or retried; dlq; completed, if a result or an event tells
    so. Attempts count finished runs, since the last replay if there was one. Without any trace of
    it: unknown, and exit code 1.

    Example: chasqui job emails 01JH8ZT4Q5Y0V0Y9M5S1M3E7WX
    """
    must_exist(queue, redis_url, as_json=as_json)
    keys = Keys(queue)
    found = on_server(redis_url, lambda it: it.run(_find(keys, job_id, group)), queue=queue)
    if not as_json:
        found["events"] = "\n".join(map(_event_line, found["events"])) or None
    show(found, as_json=as_json)
    if found["state"] == "unknown":
        raise typer.Exit(1)


def _find(keys: Keys, job_id: str, group: str) -> Plan[Found]:
    past = yield from _past(keys, job_id)
    told: Found = {"events": [_event_facts(event) for event in past]}
    for _ in range(2):  # it may move from one place to the other while we look
        for place in (_in_stream, _in_delayed, _in_dlq):
            found: Found | None = yield from place(keys, job_id, group)
            if found is not None:
                return found | told
    (stored,) = yield commands(("MGET", keys.result(job_id)), effect=Effect.READ)
    names = [event.name for event in past]
    is_done = stored is not None or events.COMPLETED.decode() in names
    return {
        "state": "completed" if is_done else "unknown",
        "job_id": job_id,
        "name": next((event.job_name for event in past if event.job_name), None),
        # The last that is told: a replay begins to count anew.
        "attempts": next(
            (one for event in past[::-1] if isinstance(one := event.fields.get("attempt"), int)),
            None,
        ),
        "result": None if stored is None else _decoded(stored),
    } | told


def _in_stream(keys: Keys, job_id: str, group: str) -> Plan[Found | None]:
    entry = yield from _search(keys.stream, job_id)
    if entry is None:
        return None
    known = _known(entry)
    held = yield commands(
        ("XPENDING", keys.stream, group, entry.id, entry.id, 1), effect=Effect.READ, raises=False
    )
    if not isinstance(held, list) or not held:
        return {"state": "waiting", "entry_id": entry.id.decode()} | known
    _, consumer, idle_ms, deliveries = held[0]
    who = consumer.decode(errors="replace")
    if idle_ms >= HANDED_BACK_MS:
        entry_id = entry.id.decode()
        return {"state": "waiting", "entry_id": entry_id, "handed_back_by": who} | known
    return {
        "state": "pending",
        "entry_id": entry.id.decode(),
        "consumer": who,
        "idle_ms": idle_ms,
        "deliveries": deliveries,
    } | known


def _in_delayed(keys: Keys, job_id: str, group: str) -> Plan[Found | None]:
    member: bytes | None = yield commands(("GET", keys.didx(job_id)), effect=Effect.READ)
    if member is not None:
        due = yield commands(("ZSCORE", keys.delayed, member), effect=Effect.READ)
        if due is not None:
            ((_, due_ms),) = scored([[member, due]])
            return _delayed(member, due_ms, job_id)
    start = 0
    while True:  # without an index: chasquimq's
        reply = yield commands(
            ("ZRANGE", keys.delayed, start, start + _PAGE - 1, "WITHSCORES"), effect=Effect.READ
        )
        page = list(scored(reply))
        for member, due_ms in page:
            if (found := _delayed(member, due_ms, job_id)) is not None:
                return found
        if len(page) < _PAGE:
            return None
        start += _PAGE


def _delayed(member: bytes, due_ms: int, job_id: str) -> Found | None:
    try:
        name, encoded = decode_delayed_member(member)
        envelope = decode_envelope(encoded)
    except EnvelopeError:
        return None
    if envelope.id != job_id:
        return None
    return {
        "state": "delayed",
        "due": at_ms(due_ms),
        "job_id": job_id,
        "name": name,
        "attempts": envelope.attempt,
        "created": at_ms(envelope.created_at_ms),
        "data": _decoded(envelope.payload),
    }


def _in_dlq(keys: Keys, job_id: str, group: str) -> Plan[Found | None]:
    entry = yield from _search(keys.dlq, job_id)
    if entry is None:
        return None
    selection = dlq.Selection(ids=[entry.id.decode()])
    for dead in (yield from dlq.peek(keys, 1, selection)):
        return {
            "state": "dlq",
            "dlq_id": dead.dlq_id,
            "dead_since": at_ms(dead.added_ms),
            "reason": dead.reason,
            "error": dead.error or dead.detail,
            **_known(entry),
            "attempts": dead.attempts if dead.attempts is not None else dead.attempt + 1,
        }
    return None


def _search(stream: bytes, job_id: str) -> Plan[Entry | None]:
    """The entry of a job, looked for from when its id was made on, then before."""
    made_ms = str(max(0, drawn_ms(job_id) - _SKEW_MS)).encode()
    for start, end in ((made_ms, b"+"), (b"-", b"(" + made_ms + b"-0")):
        while end != b"(0-0":
            page: list[Entry] = yield commands(
                ("XRANGE", stream, start, end, "COUNT", _PAGE),
                effect=Effect.READ,
                builder=EntryBuilder("range", _ANY_SIZE),
            )
            for entry in page:
                if entry.job_id == job_id:
                    return entry
            if len(page) < _PAGE:
                break
            start = b"(" + page[-1].id
    return None


def _past(keys: Keys, job_id: str) -> Plan[list[QueueEvent]]:
    """The events of the job that are left."""
    found: list[QueueEvent] = []
    start = b"-"
    while True:
        page = yield commands(
            ("XRANGE", keys.events, start, "+", "COUNT", _PAGE), effect=Effect.READ
        )
        found += [event for one in page for event in (parse_event(*one),) if event.job_id == job_id]
        if len(page) < _PAGE:
            return found
        start = b"(" + page[-1][0]


def _known(entry: Entry) -> Found:
    return {
        "job_id": entry.job_id,
        "name": entry.name,
        "attempts": entry.attempt,
        "created": at_ms(entry.created_at_ms),
        "data": _decoded(entry.payload),
    }


def _decoded(stored: bytes) -> Any:
    try:
        return payload.decode(stored, max_bytes=_ANY_SIZE)
    except PayloadError as error:
        return f"(cannot be read: {error})"


def _event_facts(event: QueueEvent) -> Found:
    return {"id": event.id, "event": event.name, **event.fields}


def _event_line(facts: Found) -> str:
    ts = facts.get("ts")
    rest = (f"{name}={value}" for name, value in facts.items() if name not in ("id", "event", "ts"))
    when = cell(at_ms(ts)) if isinstance(ts, int) else facts["id"]
    return " ".join([when, facts["event"], *rest])
