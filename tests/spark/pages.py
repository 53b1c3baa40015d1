"""A report made by hand, with everything in it that is hard to draw. No JVM is needed."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2026, 1, 31, 22, 10, tzinfo=UTC)
WINDOW_S = 60
#: Windows in which nothing happened, or of which nothing is known.
GAPS = (*range(20, 26), *range(50, 53), 54)
EVIL = "<script>alert('no')</script>"


def at(minutes: float) -> str:
    return (START + timedelta(minutes=minutes)).isoformat()


def make_report(scale: int = 1, **changed: Any) -> dict[str, Any]:
    """Two queues over two hours; `scale` makes counts larger."""
    timeline = [_window(i, scale) for i in range(118) if i not in GAPS]
    counted = ("started", "completed", "failed", "retried", "dead_lettered")
    totals = {name: sum(row[name] for row in timeline) for name in counted}
    times = {"run_us_p50": 7_900, "run_us_p95": 46_000, "run_us_p99": 2_450_000}
    waits = {"wait_ms_p50": 12, "wait_ms_p95": 26_989, "wait_ms_p99": 104_000}
    return {
        "made": at(121),
        "events": 3 * totals["completed"],
        "first": at(0.2),
        "last": at(117.8),
        "since": at(-1320),
        "window_s": WINDOW_S,
        "queues": ["orders", "refunds-of-the-northern-hemisphere"],
        "kept": [
            {"queue": "orders", "first": at(0), "trimmed": 1_234_567},
            {"queue": "refunds-of-the-northern-hemisphere", "first": at(-2000), "trimmed": 9},
        ],
        "losses": [
            {"queue": "orders", "after_ts": at(49.5), "before_ts": at(53), "lost": 12_345},
            {"queue": "orders", "after_ts": at(80), "before_ts": at(80.01), "lost": None},
        ],
        "totals": {**totals, **times, **waits},
        "by_queue": [
            {"queue": name, **totals, **times}
            for name in ("orders", "refunds-of-the-northern-hemisphere")
        ],
        "timeline": timeline,
        "heat": [
            {"start": row["start"], "from_us": us, "runs": 1 + (i * us) % 977}
            for i, row in enumerate(timeline)
            for us in (1, 500, 1000, 2000, 5000, 100_000, 50_000_000)
            if us < 50_000_000 or i % 40 == 0
        ],
        "names": [
            {"queue": "orders", "name": name, **totals, **times}
            for name in ("resize", EVIL, "", "a-name-that-is-as-long-as-names-may-be." * 6)
        ],
        "names_in_all": 40,
        "funnel": [
            {"attempts": 1, "outcome": "completed", "jobs": totals["completed"]},
            {"attempts": 1, "outcome": "dead-lettered", "jobs": 5},
            {"attempts": 3, "outcome": "completed", "jobs": 50},
        ],
        "signatures": _signatures(scale),
        "dlq": {
            "jobs": 7,
            "reasons": [{"reason": "unrecoverable", "jobs": 5}, {"reason": None, "jobs": 2}],
            "signatures": _signatures(1)[:1],
        },
        **changed,
    }


def _window(i: int, scale: int) -> dict[str, Any]:
    wave = 1 + math.sin(i / 9)
    failed = 3 + i % 7 if i % 5 == 0 else 0
    is_quiet = i in (53, 55)  # alone between gaps
    return {
        "start": at(i),
        "started": round(4000 * wave) * scale + 1,
        "completed": round(4000 * wave) * scale,
        "failed": failed,
        "retried": max(0, failed - 1),
        "dead_lettered": min(1, failed),
        "run_us_p50": 7_900 + 90 * i,
        "run_us_p95": 46_000 + 300 * i,
        "run_us_p99": 90_000 + 2_000 * i,
        "wait_ms_p50": None if is_quiet else 900 * wave,
        "wait_ms_p95": None if is_quiet else 42_000 * wave,
        "wait_ms_p99": None if is_quiet else 50_000 * wave,
    }


def _signatures(scale: int) -> list[dict[str, Any]]:
    reasons = {
        "800af96b3a7a": "TimeoutError: the shop did not answer order <n> in <n> s",
        "5e83bb865d1d": f"ValueError: {EVIL} and a-word-without-any-place-to-break-it" + "x" * 200,
        "da39a3ee5e6b": "",
    }
    return [
        {
            "signature": signature,
            "masked_reason": reason,
            "failures": 5 * scale,
            "first_seen": at(3),
            "last_seen": at(117),
            "queues": ["orders", "refunds-of-the-northern-hemisphere"],
            "names": ["resize", ""],
            "sample_ids": ["01M7PAGS05N3KQGDFH52PPS2PX", "own-id:" + "y" * 249],
        }
        for signature, reason in reasons.items()
    ]
