"""What an option cannot be is refused when its owner is made, by its name."""

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from chasqui import Consumer, Promoter, QueueEvents, Scheduler, Worker, WorkerConfig


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
    Worker("q", plain, concurrency=None)


# ── A worker's options in one object ────────────────────────────────────────────────────────────


def test_a_worker_takes_each_option_of_its_config_as_a_keyword() -> None:
    of_config = {option.name: option.type for option in fields(WorkerConfig) if option.init}
    of_worker = dict(inspect.signature(Worker).parameters)
    for name in ("queue_name", "handler", "config"):
        del of_worker[name]
    assert of_worker.keys() == of_config.keys()
    for name, parameter in of_worker.items():
        assert parameter.default is None, name
        kind: Any = of_config[name]
        assert parameter.annotation == kind | None, name


def test_workers_that_share_a_config_have_names_of_their_own() -> None:
    config = WorkerConfig(concurrency=3)
    one, other = Worker("q", plain, config=config), Worker("q", plain, config=config)
    assert config.consumer_id is None
    assert one.consumer_id != other.consumer_id
    assert Worker("q", plain, config=WorkerConfig(consumer_id="me")).consumer_id == "me"


def test_a_keyword_replaces_what_the_config_says() -> None:
    config = WorkerConfig(shutdown_deadline_s=5, consumer_id="me", concurrency=3)
    worker = Worker("q", plain, config=config, shutdown_deadline_s=30.0, consumer_id=None)
    assert (worker.shutdown_deadline_s, worker.consumer_id) == (30.0, "me")
    assert worker._config.concurrency == 3
    assert config.shutdown_deadline_s == 5
    assert Worker("q", plain, config=config, store_results=False)._config.store_results is False


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("concurrency", None),
        ("read_block_ms", None),
        ("threads", 0),
        ("processes", 0),
        ("processes", {"mail": 0}),
        ("timeout_ms", {"mail": "5"}),
        ("max_attempts", None),
        ("max_attempts", 0),
        ("max_attempts", {"mail": 0}),
        ("max_attempts", {"mail": None}),
        ("backoff", "fast"),
        ("backoff", True),
        ("backoff", {"kind": "slow", "delay_ms": 5}),
        ("backoff", {"kind": "fixed"}),
        ("backoff", {"kind": "fixed", "delay_ms": 5, "mail": 5}),
        ("backoff", {"delay_ms": 5}),
        ("backoff", {"kind": None, "delay_ms": 5}),
        ("backoff", {"mail": "fast"}),
        ("backoff", {"mail": None}),
        ("backoff", {"mail": {"delay_ms": 5}}),
        ("credential_provider", "token"),
        ("consumer_id", " "),
        ("group", None),
        ("history", 1),
        ("concurency", 5),
    ],
)
def test_a_config_is_checked_when_it_is_made(option: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=option):
        WorkerConfig(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["processes", "timeout_ms", "max_attempts", "backoff"])
def test_what_goes_by_name_is_refused_with_batches(option: str) -> None:
    with pytest.raises(TypeError, match=f"{option} cannot go by name with batch"):
        WorkerConfig(batch=5, **{option: {"mail": 1}})  # type: ignore[arg-type]


def test_a_config_is_no_other_thing() -> None:
    with pytest.raises(TypeError, match="config must be a WorkerConfig, got dict"):
        Worker("q", plain, config={"concurrency": 5})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="concurency"):
        Consumer(None, "q", concurency=5)
    with pytest.raises(FrozenInstanceError):
        WorkerConfig().concurrency = 5  # type: ignore[misc]


def test_a_config_shows_no_secret() -> None:
    config = WorkerConfig(redis_url="redis://:canary@somewhere", credential_provider=plain)  # type: ignore[arg-type]
    assert "canary" not in repr(config)
    assert "credential" not in repr(config)
