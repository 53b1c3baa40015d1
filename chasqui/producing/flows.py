"""Flows: jobs that follow one another, and a join that gets what all of them returned.

A plan says which jobs there are. It is checked and encoded as a whole before anything is sent. Then
the first step of each chain goes into the stream, and what the later ones are made of into the
flow's hash; workers add those when the steps before them have ended. Nothing is sent from here.
"""

import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import evalsha_jobs
from chasqui.errors import OutcomeUnknownError, QueueFullError
from chasqui.model import payload
from chasqui.model.job import Job
from chasqui.model.keys import Keys, check_job_name, check_text, shown
from chasqui.model.steps import JOIN, StepId, check_flow_id
from chasqui.producing.chunks import check_all
from chasqui.producing.durable import confirmed
from chasqui.producing.job_options import BackoffLike, retry_of, with_place
from chasqui.producing.new_jobs import CHUNK_BYTES, CHUNK_JOBS, ulids
from chasqui.producing.operations import QueueOperations
from chasqui.producing.settings import PLAIN, AddOptions
from chasqui.producing.tracing import safely
from chasqui.scripts import flowing
from chasqui.scripts.flowing import NIL
from chasqui.transport.request import Effect, Plan, Request, commands

Need: TypeAlias = Literal["all", "ended"]

MAX_CHAINS: Final = 100_000
MAX_STEPS: Final = 100
#: How often chunks that came before those in front of them are sent again.
ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Step:
    """One job of a flow."""

    name: str
    #: What its handler gets; for a step behind another, without the result of that one.
    data: Any = None
    #: For a step behind another: the key of `data`, a dict, that gets the result. None: the result
    #: is all of its data. A join gets a list, with the result of each chain in their order.
    result_as: str | None = None
    attempts: int | None = None
    backoff: BackoffLike | None = None


@dataclass(frozen=True, slots=True)
class FlowPlan:
    """Chains that run side by side and, behind them all, a join.

    With `need="all"` the join runs when all chains have succeeded; if one has not, its last job
    goes to the dead-letter queue, and comes back once failed steps are replayed and succeed. With
    `need="ended"` the join runs in any case, with a `Failed` for each chain that failed.
    """

    chains: Sequence[Sequence[Step]]
    #: The join, and what follows it; empty if there is none.
    join: Sequence[Step] = ()
    need: Need = "all"

    def __post_init__(self) -> None:
        if not 1 <= len(self.chains) <= MAX_CHAINS:
            raise ValueError(f"a flow has from 1 to {MAX_CHAINS} chains, got {len(self.chains)}")
        if self.need not in ("all", "ended"):
            raise ValueError(f"need must be 'all' or 'ended', got {shown(self.need)}")
        if self.need == "ended" and not self.join:
            raise ValueError("need='ended' is for flows with a join")
        for i, chain in enumerate(self.chains):
            if not 1 <= len(chain) <= MAX_STEPS:
                raise ValueError(f"chains[{i}] must have from 1 to {MAX_STEPS} steps")
        if len(self.join) > MAX_STEPS:
            raise ValueError(f"join must have at most {MAX_STEPS} steps")


@dataclass(frozen=True, slots=True)
class Flow:
    """A flow that was begun."""

    id: str
    #: How many chains run side by side.
    total: int
    #: The job whose result is the flow's: the end of the join or of the only chain. None if
    #: several chains have no join.
    last: Job | None


class EncodedFlow:
    """A flow to begin: checked, and ready to be cut into chunks."""

    def __init__(self, plan: FlowPlan, flow_id: str | None = None) -> None:
        self.created_at_ms = time.time_ns() // 1_000_000
        self.id = ulids.next(self.created_at_ms) if flow_id is None else check_flow_id(flow_id)
        self.total = len(plan.chains)
        #: Where the caller waits for the last job.
        self.owner: Any = None
        self.job_kind: type[Job] = Job
        self.ids: list[str | None] = []
        self._payloads: list[bytes] = []
        self._names: list[str] = []
        self._retries: list[bytes | None] = []
        #: For each chain the fields of the flow's hash: what its later steps are made of.
        self._fields: list[list[bytes]] = []
        for i, chain in enumerate(plan.chains):
            self._take(str(i), chain)
        self._fields[0] += (b"need", plan.need.encode(), b"join", b"1" if plan.join else b"0")
        self._fields[0] += self._later(JOIN, plan.join, 0)
        self._last: tuple[StepId, Step] | None = None
        if plan.join or self.total == 1:
            end = plan.join or plan.chains[0]
            place = StepId(self.id, JOIN if plan.join else "0", len(end) - 1)
            self._last = place, end[-1]

    def _take(self, chain: str, steps: Sequence[Step]) -> None:
        first = steps[0]
        try:
            self._names.append(check_job_name(first.name))
            self._payloads.append(payload.encode(first.data))
            self._retries.append(retry_of(first.attempts, first.backoff))
        except (TypeError, ValueError) as error:
            raise _at(chain, 0, error) from None
        self.ids.append(str(StepId(self.id, chain, 0)))
        self._fields.append(self._later(chain, steps, 1) if len(steps) > 1 else [])

    def _later(self, chain: str, steps: Sequence[Step], first: int) -> list[bytes]:
        fields: list[bytes] = []
        for number in range(first, len(steps)):
            try:
                made = _template(StepId(self.id, chain, number), steps[number])
            except (TypeError, ValueError) as error:
                raise _at(chain, number, error) from None
            fields += (b"n%b.%d" % (chain.encode(), number), made)
        return fields

    def flow(self) -> Flow:
        """What the caller gets."""
        if self._last is None:
            return Flow(self.id, self.total, None)
        place, step = self._last
        made = self.job_kind
        job = made(str(place), step.name, step.data, 0, self.created_at_ms, True, self.owner)
        return Flow(self.id, self.total, job)

    def immediate(self) -> int:
        """How many jobs go straight into the stream."""
        return self.total

    def slices(self) -> list[slice]:
        """Where to cut the chains into chunks."""
        cuts, size = [0], 0
        for i, (encoded, fields) in enumerate(zip(self._payloads, self._fields, strict=True)):
            own = len(encoded) + sum(map(len, fields))
            if i > cuts[-1] and (i - cuts[-1] >= CHUNK_JOBS or size + own > CHUNK_BYTES):
                cuts.append(i)
                size = 0
            size += own
        return [slice(*ends) for ends in zip(cuts, [*cuts[1:], self.total], strict=True)]

    def chunk(
        self, keys: Keys, part: slice, *, max_len: int | None, max_backlog: int | None, trace: str
    ) -> Request:
        """The script call that adds these chains."""
        script, names, arguments = flowing.begin(
            keys,
            self.id,
            part.start,
            self.total,
            [word for fields in self._fields[part] for word in fields],
            max_len=max_len,
            max_backlog=max_backlog,
            trace=trace,
        )
        buffer = CommandBuffer()
        evalsha_jobs(
            buffer,
            script.sha,
            names,
            arguments,
            ulids,
            self.created_at_ms,
            self._payloads[part],
            self._names[part],
            self.ids[part],
            self._retries[part],
        )
        return Request(bytes(buffer), Effect.IDEMPOTENT, script=script)


def _template(place: StepId, step: Step) -> bytes:
    """What a worker makes the step's envelope of, once it has the result before it; flow.lua says
    how: name, head of the envelope, head of the payload, end of the envelope."""
    name = check_job_name(step.name).encode()
    retry = retry_of(step.attempts, step.backoff) or b""
    head = (b"\x95" if retry else b"\x94") + payload.encode(str(place))
    before = b""
    if step.result_as is None:
        if step.data is not None:
            raise ValueError("data must be None where no result_as says which part the result is")
    else:
        check_text(step.result_as, "result_as")
        if not isinstance(step.data, Mapping | None):
            kind = type(step.data).__name__
            raise TypeError(f"data must be a dict, into which the result goes, got {kind}")
        given = dict(step.data or {})
        if step.result_as in given:
            raise ValueError(f"data has {step.result_as!r} already, which the result is to be")
        before = payload.encode(given | {step.result_as: None})[: -len(NIL)]
    return struct.pack("<3I", len(name), len(head), len(before)) + name + head + before + retry


def _at(chain: str, number: int, error: Exception) -> Exception:
    place = f"join[{number}]" if chain == JOIN else f"chains[{chain}][{number}]"
    return with_place(place, error)


def begin(
    operations: QueueOperations, flow: EncodedFlow, options: AddOptions = PLAIN
) -> Plan[None]:
    """Add the first steps of all chains: each once, however often the link drops on the way, and
    however often it is begun under the same id."""
    if options.tracing is None:
        return (yield from _begin(operations, flow, options, ""))
    with safely(options.tracing.sending, operations.keys.queue, flow.ids) as context:
        return (yield from _begin(operations, flow, options, context or ""))


def _begin(
    operations: QueueOperations, flow: EncodedFlow, options: AddOptions, trace: str
) -> Plan[None]:
    keys, max_len = operations.keys, operations.max_stream_len
    parts = flow.slices()
    if options.durable is not None:
        yield from operations.ensure_durable(options.durable)

    def chunk(part: slice, max_backlog: int | None = None) -> Request:
        return flow.chunk(keys, part, max_len=max_len, max_backlog=max_backlog, trace=trace)

    reply = yield chunk(parts[0], options.max_backlog)
    if isinstance(reply, list):
        raise QueueFullError(keys.queue, reply[0], options.max_backlog or 0)
    if reply < 0:
        raise ValueError(
            f"flow {flow.id!r} was begun with {-reply} chains, and now has {flow.total}: "
            "begin it with the same plan, or another flow under another flow_id"
        )
    if options.durable is not None:
        is_begun = ("HEXISTS", keys.flow(flow.id), "begun")
        mark = commands(is_begun, effect=Effect.READ)
        chunks = [partial(chunk, part) for part in parts]
        check_all((yield from confirmed(chunks, mark, options.durable)), had_some=True)
        return
    yield from _add_rest(flow, reply, parts, chunk)


def _add_rest(flow: EncodedFlow, added: int, parts: list[slice], chunk: Any) -> Plan[None]:
    for _ in range(ROUNDS):
        rest = [part for part in parts if part.stop > added]
        if not rest:
            return
        replies = yield _each(chunk, rest)
        check_all(replies, had_some=True)
        added = max(replies)
    raise OutcomeUnknownError(
        f"flow {flow.id!r} has {added} of its {flow.total} chains: begin it again under this id"
    )


def _each(chunk: Any, parts: Iterable[slice]) -> Iterator[Request]:
    for part in parts:
        yield chunk(part)
