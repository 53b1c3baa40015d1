"""Steps of flows: jobs whose ids say which flow they belong to, and where in it they stand.

A step's job id is `~<flow>~<chain>.<step>`. Chains are numbered from 0; the one behind the join
is called `j`. So a retry, a replay or another worker's hands change nothing about where a job
belongs, and nothing on the wire is new.
"""

import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from chasqui.model.keys import STEP_MARK, check_job_id, shown

#: The chain behind the join.
JOIN: Final = "j"
MAX_FLOW_ID_BYTES: Final = 240
#: What ends the key of a flow's results: no other flow's key may be that.
_RESULTS_SUFFIX: Final = ":r"
#: The one key of the map that stands for the result of a chain that failed.
_FAILED: Final = "~failed"
_STEP = re.compile(r"~(.+)~(j|0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,2})", re.DOTALL)


class StepId(NamedTuple):
    """Where a job stands in a flow."""

    flow: str
    #: The number of its chain, or `j` for the one behind the join.
    chain: str
    step: int

    def __str__(self) -> str:
        return f"{STEP_MARK}{self.flow}{STEP_MARK}{self.chain}.{self.step}"


def step_of(job_id: str) -> StepId | None:
    """Where the job stands in its flow; None if the id is not one of a flow's."""
    found = _STEP.fullmatch(job_id)
    return None if found is None else StepId(found[1], found[2], int(found[3]))


def check_flow_id(flow_id: object) -> str:
    """The id itself, if a flow may carry it."""
    try:
        text = check_job_id(flow_id)
    except ValueError as error:
        raise ValueError(str(error).replace("job_id", "flow_id")) from None
    if len(text.encode()) > MAX_FLOW_ID_BYTES:
        raise ValueError(f"flow_id takes more than {MAX_FLOW_ID_BYTES} bytes of UTF-8")
    if text.endswith(_RESULTS_SUFFIX):
        raise ValueError(f"flow_id must not end with {_RESULTS_SUFFIX!r}, got {shown(text)}")
    return text


@dataclass(frozen=True, slots=True)
class Failed:
    """What a join gets in the place of a result, if it runs although a child failed."""

    #: The id of the step that failed.
    id: str
    reason: str
    error: str | None = None

    def to_data(self) -> dict[str, Any]:
        """The form in which it is part of a payload."""
        return {_FAILED: {"id": self.id, "reason": self.reason, "error": self.error}}

    @classmethod
    def of(cls, value: object) -> "Failed | None":
        """The failure that a value of a payload stands for; None if it is a result."""
        if not isinstance(value, dict) or value.keys() != {_FAILED}:
            return None
        match value[_FAILED]:
            case {"id": str(job_id), "reason": str(reason), "error": str() | None as error}:
                return cls(job_id, reason, error)
            case {"id": str(job_id), "reason": str(reason)}:
                return cls(job_id, reason)
        return None  # a result that looks alike
