"""What a flow should be after its steps have ended, in plain Python: nothing is counted, all of it
follows from which steps have ended how."""

from dataclasses import dataclass, field
from typing import Any

from chasqui.model.steps import JOIN, Failed, StepId
from chasqui.producing.flows import FlowPlan, Step

FLOW = "f"
DONE, DEAD = "1", "x"


@dataclass
class FlowModel:
    """A flow, the jobs that wait, and the dead ones."""

    plan: FlowPlan
    #: How each step has ended.
    marks: dict[StepId, str] = field(default_factory=dict)
    returned: dict[StepId, Any] = field(default_factory=dict)
    #: Jobs in the stream: where each stands, and its data.
    waiting: list[tuple[StepId, Any]] = field(default_factory=list)
    #: Dead jobs, but for those that stand for others.
    dead: list[tuple[StepId, Any]] = field(default_factory=list)
    #: What the join was given.
    joined: list[Any] | None = None

    def __post_init__(self) -> None:
        for i, chain in enumerate(self.plan.chains):
            self.waiting.append((StepId(FLOW, str(i), 0), chain[0].data))

    # ── What happens ────────────────────────────────────────────────────────────────────────────

    def done(self, number: int, value: Any) -> None:
        place, _ = self.waiting.pop(number)
        if self.marks.get(place) == DONE:
            return
        self.marks[place], self.returned[place] = DONE, value
        steps = self.steps(place.chain)
        if place.step + 1 < len(steps):
            self._add(place._replace(step=place.step + 1), value)
        self._join()

    def died(self, number: int, reason: str) -> None:
        job = self.waiting.pop(number)
        self.dead.append(job)
        place = job[0]
        if place not in self.marks:
            self.marks[place] = DEAD
            self.returned[place] = Failed(str(place), reason, "why").to_data()
            self._join()

    def replay(self, number: int) -> None:
        self.waiting.append(self.dead.pop(number))

    # ── What follows ────────────────────────────────────────────────────────────────────────────

    def steps(self, chain: str) -> list[Step]:
        return list(self.plan.join if chain == JOIN else self.plan.chains[int(chain)])

    def end(self, chain: str) -> tuple[str | None, StepId]:
        """How far a chain is: at which step, and how that has ended."""
        for number in range(len(self.steps(chain))):
            place = StepId(FLOW, chain, number)
            if self.marks.get(place) != DONE:
                return self.marks.get(place), place
        return DONE, place

    @property
    def ends(self) -> list[tuple[str | None, StepId]]:
        return [self.end(str(i)) for i in range(len(self.plan.chains))]

    @property
    def left(self) -> int:
        return sum(mark is None for mark, _ in self.ends)

    @property
    def failed(self) -> int:
        return sum(mark == DEAD for mark, _ in self.ends)

    @property
    def stand_ins(self) -> list[tuple[StepId, str]]:
        """The jobs that others stand for in the dead-letter queue, and why."""
        found = []
        chains = [JOIN] if self.plan.join else [str(i) for i in range(len(self.plan.chains))]
        for chain in chains:
            last = StepId(FLOW, chain, len(self.steps(chain)) - 1)
            mark, place = self.end(chain)
            if mark == DEAD and place != last:
                found.append((last, "step_failed"))
        is_over = self.plan.join and self.joined is None and not self.left
        if is_over and self.failed and self.plan.need == "all":
            found.append((StepId(FLOW, JOIN, len(self.plan.join) - 1), "children_failed"))
        return found

    def _join(self) -> None:
        if not self.plan.join or self.joined is not None or self.left:
            return
        if not self.failed or self.plan.need == "ended":
            self.joined = [self.returned[place] for _, place in self.ends]
            self._add(StepId(FLOW, JOIN, 0), self.joined)

    def _add(self, place: StepId, value: Any) -> None:
        step = self.steps(place.chain)[place.step]
        data = value if step.result_as is None else {**(step.data or {}), step.result_as: value}
        self.waiting.append((place, data))
