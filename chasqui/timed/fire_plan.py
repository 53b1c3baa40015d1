"""Which fires a repeat spec owes at a given moment.

Nothing here reads a clock or talks to Redis: the scheduler passes Redis's time in.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from chasqui.timed.spec import RepeatSpec

#: The most fires that one plan makes up for, whatever `max_catchup` allows: planning them must not
#: block a worker's event loop.
MAX_FIRES_PER_PLAN: Final = 10_000


@dataclass(frozen=True, slots=True)
class FirePlan:
    """What a due spec fires now, and when it is due again."""

    #: Oldest first.
    fire_times_ms: list[int]
    #: None: the spec is finished and is deleted.
    next_ms: int | None

    def steps(self, most: int) -> Iterator["FirePlan"]:
        """The same as plans of at most `most` fires each, to be carried out in this order.

        If you stop between two steps, the spec is still due at the first fire that it owes.
        """
        times = self.fire_times_ms
        for start in range(0, max(len(times), 1), most):
            end = start + most
            yield FirePlan(times[start:end], times[end] if end < len(times) else self.next_ms)


def plan_fires(
    spec: RepeatSpec, due_ms: int, now_ms: int, fired: int, *, led_since_ms: int | None = None
) -> FirePlan:
    """What `spec` does at `now_ms`, due at `due_ms` (its score) and fired `fired` times so far.

    If one fire is due, it is fired, however late. If two or more are due, they are missed fires,
    and the spec's policy decides about all of them: skip them; fire once, as of `due_ms`; or fire
    from the oldest on, up to `max_catchup` and MAX_FIRES_PER_PLAN, and skip the others. chasquimq
    does the same.
    Skipping is meant for fires that came while no scheduler ran. So the last one is fired if it
    came after `led_since_ms`, when this scheduler began to lead: then the scheduler itself is late.
    Raises ValueError for a cron expression that cannot be read.
    """
    if due_ms > now_ms:
        return FirePlan([], due_ms)
    left = spec.limit - fired if spec.limit else MAX_FIRES_PER_PLAN + 1
    if left <= 0 or spec.is_over(due_ms):
        return FirePlan([], None)

    times = [due_ms]
    following = spec.next_ignoring_end(due_ms)
    is_missed = following is not None and following <= now_ms
    policy = spec.missed_fires
    if is_missed and policy is None:
        times = []
        if led_since_ms is not None and led_since_ms < now_ms:
            last = _last_fire(spec, due_ms, now_ms, led_since_ms)
            times = [last] if last > led_since_ms else []
    elif is_missed and policy is not None and policy.max_catchup is not None:
        most = min(policy.max_catchup, left, MAX_FIRES_PER_PLAN)
        while len(times) < most:
            later = spec.next_fire_ms(times[-1])
            if later is None or later > now_ms:
                break
            times.append(later)
    next_ms = None if len(times) >= left else _first_fire_past(spec, due_ms, now_ms)
    return FirePlan(times, next_ms)


def _first_fire_past(spec: RepeatSpec, due_ms: int, now_ms: int) -> int | None:
    """The first fire later than `now_ms`, in one step however long ago `due_ms` was."""
    interval = spec.pattern.interval_ms
    if interval is not None:
        # Steps from `due_ms`, not from now: the interval keeps its beat.
        now_ms = due_ms + (now_ms - due_ms) // interval * interval
    return spec.next_fire_ms(now_ms)


def _last_fire(spec: RepeatSpec, due_ms: int, until_ms: int, after_ms: int) -> int:
    """Of the fires from `due_ms` on, the last one by `until_ms`, if it is later than `after_ms`;
    otherwise any fire that is not later. Takes few steps however long ago `due_ms` was."""
    if spec.end_before_ms is not None:
        until_ms = min(until_ms, spec.end_before_ms)
    interval = spec.pattern.interval_ms
    if interval is not None:
        return due_ms + (until_ms - due_ms) // interval * interval
    next_after = spec.cron().next_after

    def is_last(second: int) -> bool:
        following = next_after(second * 1000)
        return following is None or following > until_ms

    # A cron expression fires on whole seconds.
    seconds = range(max(due_ms, after_ms) // 1000, until_ms // 1000)
    found = bisect_left(seconds, True, key=is_last)
    return (seconds.start + found) * 1000 if found else due_ms
