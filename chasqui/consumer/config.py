"""What a worker is told, checked once."""

import os
import socket
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from chasqui.model.config import MAX_COUNT, MAX_MS, check_int
from chasqui.consuming.fate import Limits
from chasqui.model.keys import DEFAULT_GROUP, check_text, shown

#: How long an entry may sit without a sign of life before another consumer takes it over. A
#: heartbeat renews it at a third of that, so it says how fast a crash is noticed, not how long a
#: handler may run.
CLAIM_MIN_IDLE_MS: Final = 15_000
READ_BLOCK_MS: Final = 5_000
MAX_READ: Final = 1_000
MAX_PAYLOAD_BYTES: Final = 1 << 20
RESULT_TTL_MS: Final = 3_600_000
SHUTDOWN_DEADLINE_S: Final = 30.0
#: Prefetched envelopes may take this much memory.
PREFETCH_BYTES: Final = 32 << 20
#: Each slot is a task of its own, opened when the worker starts.
MAX_CONCURRENCY: Final = 100_000


def default_consumer_id() -> str:
    """A name that tells an operator where the consumer runs, and is never used twice."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class ConsumerConfig:
    """Settings of one consumer. None takes the default."""

    concurrency: int = 100
    limits: Limits = field(default_factory=Limits)
    group: str = DEFAULT_GROUP
    consumer_id: str = field(default_factory=default_consumer_id)
    read_block_ms: int = READ_BLOCK_MS
    #: The most entries of one read; None lets the reader choose by how fast handlers are.
    read_count: int | None = None
    #: The most entries to hold beyond those that run; None lets the reader choose in the same way.
    prefetch: int | None = None
    claim_min_idle_ms: int = CLAIM_MIN_IDLE_MS
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    dlq_max_stream_len: int | None = None
    events_enabled: bool = True
    #: Whether finished jobs are kept, with what they carried.
    history: bool = False
    delayed_enabled: bool = True
    run_scheduler: bool = True
    scheduler_tick_ms: int | None = None
    store_results: bool = False
    result_ttl_ms: int = RESULT_TTL_MS
    shutdown_deadline_s: float = SHUTDOWN_DEADLINE_S
    #: Jobs that a handler gets at once; None: one at a time, not in a list.
    batch: int | None = None
    #: How long a batch may wait to become full.
    batch_linger_ms: int = 50

    def __post_init__(self) -> None:
        for name, low in (
            ("read_block_ms", 1),
            ("read_count", 1),
            ("prefetch", 0),
            ("claim_min_idle_ms", 100),
            ("max_payload_bytes", 1),
            ("dlq_max_stream_len", 1),
            ("scheduler_tick_ms", 1),
            ("result_ttl_ms", 1),
            ("batch", 1),
            ("batch_linger_ms", 0),
        ):
            high = MAX_MS if name.endswith("_ms") else MAX_COUNT
            check_int(name, getattr(self, name), low, high)
        if not isinstance(self.history, bool):
            raise TypeError(f"history must be a bool, got {type(self.history).__name__}")
        check_int("concurrency", self.concurrency, 1, MAX_CONCURRENCY, takes_none=False)
        check_int("max_attempts", self.limits.max_attempts, 1)
        check_int("max_deliveries", self.limits.max_deliveries, 1)
        for name in ("group", "consumer_id"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip() or len(value) > 256:
                raise ValueError(f"{name} must be a non-empty str of at most 256 characters")
            check_text(value, name)
        deadline_s: object = self.shutdown_deadline_s
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float):
            kind = type(deadline_s).__name__
            raise TypeError(f"shutdown_deadline_s must be seconds, got {kind}")
        if not 0 <= deadline_s <= MAX_MS / 1000:
            raise ValueError(
                f"shutdown_deadline_s must be from 0 to {MAX_MS // 1000}, got {shown(deadline_s)}"
            )


def make_config(
    *, max_attempts: int, max_deliveries: int | None = None, **options: Any
) -> ConsumerConfig:
    """A config from keyword arguments as users write them: None means the default."""
    given = {name: value for name, value in options.items() if value is not None}
    return ConsumerConfig(limits=Limits(max_attempts, max_deliveries), **given)
