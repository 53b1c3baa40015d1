"""When which fault strikes, drawn from a seed: the same seed, the same schedule."""

import random
from dataclasses import dataclass

from tests.chaos import link_faults, process_faults, server_faults  # noqa: F401 - they add kinds
from tests.chaos.scene import KINDS, Kind

#: The first fault strikes after this share of the jobs, the last one while some are yet to come.
_FROM, _TO = 0.04, 0.88
#: So many of a hundred faults strike together with the one before.
_TOGETHER = 0.3
#: Where nothing is left that could be struck, so many draws show it.
_REDRAWS = 20


@dataclass(frozen=True)
class Strike:
    """One fault of the schedule."""

    #: The share of all jobs that is done when it strikes.
    at: float
    kind: Kind
    seed: int
    #: How often another was drawn in its place before, each for want of something to strike.
    redraws: int = 0


def kinds_of(*, is_general: bool = False, only: list[str] | None = None) -> list[Kind]:
    """The kinds of faults that apply; `is_general`: to any queue, not only to ours."""
    kinds = [kind for kind in KINDS.values() if kind.is_general or not is_general]
    if only is None:
        return kinds
    if unknown := set(only) - {kind.name for kind in kinds}:
        raise ValueError(f"no such fault: {', '.join(sorted(unknown))}")
    return [kind for kind in kinds if kind.name in only]


def draw(seed: int, faults: int, kinds: list[Kind]) -> list[Strike]:
    """A schedule of so many faults: every kind once before any comes twice."""
    luck = random.Random(seed)
    order: list[Kind] = []
    while len(order) < faults:
        order += luck.sample(kinds, len(kinds))
    moments = sorted(luck.uniform(_FROM, _TO) for _ in range(faults))
    for i in range(1, faults):
        if luck.random() < _TOGETHER:
            moments[i] = moments[i - 1]
    return [
        Strike(at, kind, luck.randrange(1 << 32))
        for at, kind in zip(moments, order[:faults], strict=True)
    ]


def redraw(strike: Strike, kinds: list[Kind]) -> Strike | None:
    """Another fault for one that found nothing to strike; its seed says which. None after many."""
    if strike.redraws == _REDRAWS:
        return None
    luck = random.Random(strike.seed)
    return Strike(strike.at, luck.choice(kinds), luck.randrange(1 << 32), strike.redraws + 1)
