"""From due repeat specs to the script calls that fire them."""

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from chasqui._core.envelope import encode_envelope
from chasqui._core.reply import ReplyError
from chasqui._core.ulid import UlidFactory
from chasqui.scripts.timing import SpecFires
from chasqui.timed.fire_plan import FirePlan
from chasqui.timed.repeatables import hash_of
from chasqui.timed.spec import RepeatSpec

#: The most jobs that one script call fires, and their most bytes: meanwhile the server serves
#: nobody else.
FIRES_PER_CALL: Final = 256
BYTES_PER_CALL: Final = 4 << 20
#: A count of fires that the script can increment.
_FIRED: Final = re.compile(rb"0|[1-9][0-9]{0,14}")


class Owed(NamedTuple):
    """A due spec and what it fires now."""

    #: Its member of the repeat set, and its score there.
    member: bytes
    due_ms: int
    spec: RepeatSpec
    plan: FirePlan


def read_spec(reply: list[bytes | None] | ReplyError, due_ms: int) -> tuple[RepeatSpec, int]:
    """A spec and how often it has fired, from its hash's fields `spec`, `fired` and `retry`.

    Raises ValueError if they cannot be read.
    """
    encoded, fired, retry = hash_of(reply)
    if encoded is None:
        raise ValueError("its hash has no field `spec`")
    if fired is not None and not _FIRED.fullmatch(fired):
        raise ValueError(f"its count of fires is {fired!r}")
    if due_ms < 0:
        raise ValueError("its score is not a time")
    return RepeatSpec.decode(encoded, retry), int(fired or 0)


def fire_calls(owed: Iterable[Owed], now_ms: int, ulids: UlidFactory) -> Iterator[list[SpecFires]]:
    """What each script call fires, in this order, so that no call is too large. A long plan takes
    several calls; each starts from the score that the one before it sets."""
    specs: list[SpecFires] = []
    fires = size = 0
    for member, due_ms, spec, plan in owed:
        each = len(spec.payload) + 1
        for step in plan.steps(max(1, min(FIRES_PER_CALL, BYTES_PER_CALL // each))):
            times = step.fire_times_ms
            own = max(1, len(times))
            if specs and (fires + own > FIRES_PER_CALL or size + own * each > BYTES_PER_CALL):
                yield specs
                specs, fires, size = [], 0, 0
            jobs = [
                (at_ms, encode_envelope(ulids.next(now_ms), spec.payload, now_ms, 0, spec.retry))
                for at_ms in times
            ]
            specs.append(SpecFires(member, due_ms, step.next_ms, spec.job_name, jobs))
            fires, size = fires + own, size + own * each
            due_ms = step.next_ms or 0
    if specs:
        yield specs
