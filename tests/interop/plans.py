"""What each numbered job of a mixed fleet is to do; shared by both implementations."""

from typing import Any


def plan(n: int) -> str:
    """`ok`, `flaky` (its first run fails), `fail` (both do), or `final`."""
    return {3: "flaky", 7: "fail", 9: "final"}.get(n % 20, "ok")


def entries(first: int, count: int) -> list[dict[str, Any]]:
    """Jobs for `add_bulk`, some of them delayed."""
    made = []
    for n in range(first, first + count):
        entry: dict[str, Any] = {"name": plan(n), "data": {"n": n, "plan": plan(n)}}
        if plan(n) in ("flaky", "fail"):
            entry |= {"attempts": 2, "backoff": {"kind": "fixed", "delay_ms": 5, "jitter_ms": 0}}
        if n % 10 == 5:
            entry["delay_ms"] = n % 200 + 1
        made.append(entry)
    return made


def outcome(data: dict[str, Any], attempt: int) -> str | None:
    """What is to go wrong in this run."""
    if data["plan"] == "flaky" and attempt > 0:
        return None
    return None if data["plan"] == "ok" else str(data["plan"])


def reason(n: int) -> str | None:
    """Why the job ends in the dead-letter queue; None if it does not."""
    return {"fail": "retries_exhausted", "final": "unrecoverable"}.get(plan(n))
