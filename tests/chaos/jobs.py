"""What each job does, told by its number alone: producer, worker and judge agree without talking.

Standard library only: programs of other queues use it too.
"""

from typing import NamedTuple

#: Of a thousand jobs.
_HOPELESS, _BURIED, _FLAKY, _DELAYED, _UNIQUE, _LONG = 10, 10, 80, 80, 20, 5
_ATTEMPTS = 4


class Plan(NamedTuple):
    """One job: its handler, its options, and what becomes of it when nothing goes wrong."""

    name: str = "work"
    delay_ms: int = 0
    attempts: int | None = None
    is_unique: bool = False
    #: How long a run takes.
    takes_ms: int = 0
    #: The first so many runs fail.
    fails: int = 0
    ends_dead: bool = False

    @property
    def runs(self) -> int:
        """How often it runs if nothing goes wrong."""
        return self.attempts or 1 if self.ends_dead else self.fails + 1


def plan_of(n: int, *, is_mixed: bool = True, lease_ms: int = 1000) -> Plan:
    """The plan of job n. `is_mixed` False: all are immediate, and none fails."""
    luck = n * 2_654_435_761 % 2**32
    share, more = luck % 1000, luck // 1000
    takes_ms = more % 100
    if not is_mixed:
        return Plan(takes_ms=takes_ms)
    for plan, part in (
        (Plan("hopeless", attempts=2, takes_ms=takes_ms, fails=2, ends_dead=True), _HOPELESS),
        (Plan("bury", takes_ms=takes_ms, fails=1, ends_dead=True), _BURIED),
        (Plan("flaky", attempts=_ATTEMPTS, takes_ms=takes_ms, fails=1 + more % 2), _FLAKY),
        (Plan(delay_ms=20 + more % 3000, takes_ms=takes_ms), _DELAYED),
        (Plan(is_unique=True, takes_ms=takes_ms), _UNIQUE),
        (Plan(takes_ms=lease_ms + lease_ms // 3), _LONG),
    ):
        if share < part:
            return plan
        share -= part
    return Plan(takes_ms=takes_ms)
