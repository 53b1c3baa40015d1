"""`chasqui job`: shows where one job is, and what is known about it.

The stream and the DLQ have no index by job id, so both are searched. An id that chasqui made holds
its time: the search begins there.
"""

from typing import Annotated, Any

import typer
from ulid import ULID

from chasqui._core.entry import Entry
from chasqui._core.envelope import EnvelopeError
from chasqui.cli.known import must_exist
from chasqui.cli.options import AsJson, Group, QueueName, RedisUrl
from chasqui.cli.output import at_ms, cell, show
from chasqui.cli.run import on_server
from chasqui.errors import PayloadError
from chasqui.events import kinds
from chasqui.events.log import QueueEvent, parse_event
from chasqui.managing.consumers import HANDED_BACK_MS
from chasqui.managing.dead_jobs import DeadJob
from chasqui.managing.entries import ANY_SIZE, PAGE, delayed_job, search
from chasqui.model import payload
from chasqui.model.job import is_drawn
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.timed.repeatables import scored
from chasqui.transport.request import Effect, Plan, commands

#: The largest difference between a producer's clock and the server's that a search allows for.
_SKEW_MS = 60_000

Found = dict[str, Any]


def job(
    queue: QueueName,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The job's id.")],
    redis_url: RedisUrl = None,
    group: Group = DEFAULT_GROUP,
    as_json: AsJson = False,
) -> None:
    """Show one job: its state, data, attempts, and the events that the queue still has of it.

    States: waiting, also if a worker gave it back; pending, a worker has it and renewed its lease
    idle_ms ago; delayed, until it is due or retried; dlq; completed, if a result or an event says
    so; unknown, with exit code 1, if there is no trace of it. Attempts count finished runs, since
    the last replay if there was one.

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
    history: Found = {"events": [_event_facts(event) for event in past]}
    for _ in range(2):  # the job may move between two of these places while we look
        for place in (_in_stream, _in_delayed, _in_dlq):
            found: Found | None = yield from place(keys, job_id, group)
            if found is not None:
                return found | history
    (stored,) = yield commands(("MGET", keys.result(job_id)), effect=Effect.READ)
    names = [event.name for event in past]
    is_done = stored is not None or kinds.COMPLETED.decode() in names
    return {
        "state": "completed" if is_done else "unknown",
        "job_id": job_id,
        "name": next((event.job_name for event in past if event.job_name), None),
        # The latest number: a replay starts counting from zero.
        "attempts": next(
            (one for event in past[::-1] if isinstance(one := event.fields.get("attempt"), int)),
            None,
        ),
        "result": None if stored is None else _decoded(stored),
        "created": None if (drawn := _drawn_ms(job_id)) is None else at_ms(drawn),
    } | history


def _in_stream(keys: Keys, job_id: str, group: str) -> Plan[Found | None]:
    entry = yield from _search(keys.stream, job_id)
    if entry is None:
        return None
    known, waiting = _known(entry), {"state": "waiting", "entry_id": entry.id.decode()}
    held = yield commands(
        ("XPENDING", keys.stream, group, entry.id, entry.id, 1), effect=Effect.READ, raises=False
    )
    if not isinstance(held, list) or not held:
        return waiting | known
    _, consumer, idle_ms, deliveries = held[0]
    consumer = consumer.decode(errors="replace")
    if idle_ms >= HANDED_BACK_MS:
        return waiting | {"handed_back_by": consumer} | known
    place = waiting | {"state": "pending", "consumer": consumer}
    return place | {"idle_ms": idle_ms, "deliveries": deliveries} | known


def _in_delayed(keys: Keys, job_id: str, group: str) -> Plan[Found | None]:
    member: bytes | None = yield commands(("GET", keys.didx(job_id)), effect=Effect.READ)
    if member is not None:
        due = yield commands(("ZSCORE", keys.delayed, member), effect=Effect.READ)
        if due is not None:
            ((_, due_ms),) = scored([[member, due]])
            return _delayed(member, due_ms, job_id)
    start = 0
    while True:  # chasquimq writes no index
        reply = yield commands(
            ("ZRANGE", keys.delayed, start, start + PAGE - 1, "WITHSCORES"), effect=Effect.READ
        )
        page = list(scored(reply))
        for member, due_ms in page:
            if (found := _delayed(member, due_ms, job_id)) is not None:
                return found
        if len(page) < PAGE:
            return None
        start += PAGE


def _delayed(member: bytes, due_ms: int, job_id: str) -> Found | None:
    try:
        name, envelope = delayed_job(member)
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
    dead = DeadJob.of(entry)
    return {
        "state": "dlq",
        "dlq_id": dead.dlq_id,
        "dead_since": at_ms(dead.added_ms),
        "reason": dead.reason,
        "error": dead.error or dead.detail,
        **_known(entry),
        "attempts": dead.attempts if dead.attempts is not None else dead.attempt + 1,
    }


def _search(stream: bytes, job_id: str) -> Plan[Entry | None]:
    """The entry of a job. Looks from the time in its id onwards, then before that time."""
    made_ms = str(max(0, (_drawn_ms(job_id) or 0) - _SKEW_MS)).encode()
    entry = yield from search(stream, (job_id,), start=made_ms)
    if entry is None and made_ms != b"0":
        entry = yield from search(stream, (job_id,), end=b"(" + made_ms + b"-0")
    return entry


def _drawn_ms(job_id: str) -> int | None:
    """When the id was made, by the producer's clock; None for an id that the caller chose."""
    return ULID.from_str(job_id).milliseconds if is_drawn(job_id) else None


def _past(keys: Keys, job_id: str) -> Plan[list[QueueEvent]]:
    """The job's events that have not been trimmed."""
    found: list[QueueEvent] = []
    start = b"-"
    while True:
        page = yield commands(
            ("XRANGE", keys.events, start, "+", "COUNT", PAGE), effect=Effect.READ
        )
        found += [event for one in page for event in (parse_event(*one),) if event.job_id == job_id]
        if len(page) < PAGE:
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
        return payload.decode(stored, max_bytes=ANY_SIZE)
    except PayloadError as error:
        return f"(cannot be read: {error})"


def _event_facts(event: QueueEvent) -> Found:
    return {"id": event.id, "event": event.name, **event.fields}


def _event_line(facts: Found) -> str:
    ts = facts.get("ts")
    rest = (f"{name}={value}" for name, value in facts.items() if name not in ("id", "event", "ts"))
    when = cell(at_ms(ts)) if isinstance(ts, int) else facts["id"]
    return " ".join([when, facts["event"], *rest])
