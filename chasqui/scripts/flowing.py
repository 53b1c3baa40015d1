"""The scripts that begin flows and move them on when a step has ended."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from chasqui._core.payload import pack
from chasqui.model.keys import Keys
from chasqui.model.steps import StepId
from chasqui.scripts.adding import ChunkCall
from chasqui.scripts.loading import call, load, or_empty
from chasqui.scripts.settling import ANY_SIZE, Burial, Consumer
from chasqui.transport.request import Effect, Request

FLOW_BEGIN: Final = load("flow_begin")
FLOW_BURY: Final = load("flow_bury", "owned", "flow")
FLOW_STEP: Final = load("flow_step", "owned", "flow")

#: How long a flow is kept after its last change.
FLOW_TTL_S: Final = 7 * 86_400
#: What msgpack writes for None: the result of a step that returned nothing.
NIL: Final = b"\xc0"
#: What `step` and `bury` answer for an entry beside those of `settling`, a character each: it is
#: settled, but its flow is gone; it is settled, and another job of its flow is dead now.
NO_FLOW: Final = ord("3")
FLOW_FAILED: Final = ord("4")


class StepEnd(NamedTuple):
    """A step of a flow whose run returned."""

    entry_id: bytes
    job_id: str
    place: StepId
    #: What it returned, encoded.
    result: bytes
    #: Whether its result is stored even if the flow goes on with it.
    is_stored: bool
    #: Its ts, name, attempt, duration_us, created, and its envelope where the history is kept.
    facts: Sequence[Any]


class StepBurial(NamedTuple):
    """A step of a flow that goes to the DLQ."""

    job_id: str
    place: StepId
    #: What a join gets in the place of its result, encoded.
    stand_in: bytes
    burial: Burial


class Bounds(NamedTuple):
    """What a worker says about all flows that it moves on."""

    #: How long results are kept.
    result_ttl_ms: int
    #: A job with a longer envelope is not added: it goes to the DLQ.
    max_envelope_bytes: int
    dlq_max_len: int | None


def begin(
    keys: Keys,
    flow_id: str,
    first: int,
    total: int,
    fields: Sequence[bytes],
    *,
    max_len: int | None,
    max_backlog: int | None,
    trace: str,
) -> ChunkCall:
    """Add children of a flow, from number `first` on. `fields` go into the flow's hash, names and
    values by turns.

    The reply is how many children are in; `[depth]` if the queue is full; or, below 0, how many
    children the flow has that was begun under this id before.
    """
    arguments = [first, total, FLOW_TTL_S, or_empty(max_len), or_empty(max_backlog), trace]
    return FLOW_BEGIN, [keys.stream, keys.flow(flow_id)], [*arguments, len(fields), *fields]


def step(
    consumer: Consumer, ends: Iterable[StepEnd], bounds: Bounds, *, events: bool, history: bool
) -> Request:
    """Acknowledge steps that are still the consumer's, and move their flows on. `events` and
    `history`: whether to write the event and the history of each.

    Replies with SETTLED, NOT_STORED, NOT_OURS, NO_FLOW or FLOW_FAILED for each.
    """
    keys = consumer.keys
    names = [keys.stream, keys.dlq]
    arguments = _common(consumer, bounds, events=events, history=history)
    for end in ends:
        _, chain, number = end.place
        names += (keys.result(end.job_id), *_keys_of(keys, end.place))
        arguments += (end.entry_id, end.job_id, chain, number, end.result, int(end.is_stored))
        arguments += end.facts if history else (*end.facts, b"")
    return call(FLOW_STEP, names, arguments, Effect.IDEMPOTENT)


def bury(
    consumer: Consumer, steps: Sequence[StepBurial], bounds: Bounds, *, events: bool, history: bool
) -> Request:
    """Move steps that are still the consumer's to the DLQ, and tell their flows.

    Replies with SETTLED, NOT_OURS, NO_FLOW or FLOW_FAILED for each.
    """
    keys = consumer.keys
    names = [keys.stream, keys.dlq]
    arguments = _common(consumer, bounds, events=events, history=history)
    arguments.append(pack([one.burial.event for one in steps] if events else [], ANY_SIZE))
    arguments.append(pack([one.burial.history for one in steps] if history else [], ANY_SIZE))
    for job_id, place, stand_in, burial in steps:
        names += _keys_of(keys, place)
        arguments += (burial.entry_id, job_id, place.chain, place.step, stand_in)
        arguments += (len(burial.fields), *burial.fields)
    return call(FLOW_BURY, names, arguments, Effect.IDEMPOTENT)


def _keys_of(keys: Keys, place: StepId) -> tuple[bytes, bytes]:
    return keys.flow(place.flow), keys.flow_results(place.flow)


def _common(consumer: Consumer, bounds: Bounds, *, events: bool, history: bool) -> list[Any]:
    """The arguments that both scripts begin with."""
    keys = consumer.keys
    return [
        consumer.group,
        consumer.name,
        bounds.result_ttl_ms,
        keys.events if events else b"",
        keys.history if history else b"",
        or_empty(bounds.dlq_max_len),
        FLOW_TTL_S,
        bounds.max_envelope_bytes,
    ]
