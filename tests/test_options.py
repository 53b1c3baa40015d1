"""What an option cannot be is refused when its owner is made, by its name."""

from typing import Any

import pytest

from chasqui import Consumer, Promoter, QueueEvents, Scheduler, Worker


def plain(job: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (Worker, "concurrency", "5"),
        (Worker, "credential_provider", "token"),
        (Worker, "group", "\udc80"),
        (Worker, "consumer_id", "\udc80"),
        (Worker, "shutdown_deadline_s", "5"),
        (Worker, "shutdown_deadline_s", True),
        (Consumer, "credential_provider", "token"),
        (Promoter, "credential_provider", "token"),
        (Promoter, "poll_interval_ms", "5"),
        (Promoter, "promote_batch", -1),
        (Promoter, "promote_batch", 1.5),
        (Promoter, "max_stream_len", 0),
        (Promoter, "max_stream_len", []),
        (Promoter, "lock_ttl_secs", -1),
        (Promoter, "holder_id", 5),
        (Promoter, "holder_id", "\udc80"),
        (Scheduler, "credential_provider", "token"),
        (Scheduler, "tick_interval_ms", True),
        (Scheduler, "batch", -1),
        (Scheduler, "max_stream_len", "5"),
        (Scheduler, "lock_ttl_secs", 1.5),
        (Scheduler, "holder_id", b"me"),
        (Worker, "read_block_ms", 2**63),
        (Worker, "read_count", 2**63),
        (Worker, "prefetch", -1),
        (Worker, "claim_min_idle_ms", 2**63),
        (Worker, "max_payload_bytes", 2**63),
        (Worker, "dlq_max_stream_len", 2**63),
        (Worker, "scheduler_tick_ms", 10**400),
        (Worker, "result_ttl_ms", 2**63),
        (Worker, "batch_linger_ms", 10**400),
        (Worker, "timeout_ms", 10**400),
        (Worker, "timeout_ms", {"mail": 10**400}),
        (Worker, "shutdown_deadline_s", 10**400),
        (Promoter, "poll_interval_ms", 10**400),
        (Promoter, "promote_batch", 2**63),
        (Promoter, "max_stream_len", 2**63),
        (Promoter, "lock_ttl_secs", 2**63),
        (Scheduler, "tick_interval_ms", 10**400),
        (Scheduler, "batch", 2**63),
        (Scheduler, "max_stream_len", 2**63),
        (Scheduler, "lock_ttl_secs", 2**63),
        (QueueEvents, "block_ms", 2**63),
        (QueueEvents, "count", 2**63),
        (QueueEvents, "events", 5),
        (QueueEvents, "names", "mail"),
        (QueueEvents, "job_ids", True),
        (QueueEvents, "last_event_id", "\u0661-1"),  # a digit, but none of ours
    ],
)
def test_the_error_names_the_option(kind: Any, option: str, value: object) -> None:
    required: dict[str, Any] = {"queue_name": "q", "redis_url": "redis://127.0.0.1:1"}
    if kind is Worker:
        required["handler"] = plain
    with pytest.raises((TypeError, ValueError), match=option):
        kind(**required, **{option: value})


def test_none_is_the_default() -> None:
    Worker("q", plain, concurrency=None)  # type: ignore[arg-type]
