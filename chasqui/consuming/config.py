"""The options of a worker: names, meanings, defaults and checks, each in one place."""

import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeAlias, TypeVar

from chasqui.consuming.around import Around, check_hooks
from chasqui.consuming.fate import Backoff, Limits
from chasqui.metrics import MetricsSink
from chasqui.model.config import (
    MAX_COUNT,
    MAX_MS,
    CredentialProvider,
    check_credential_provider,
    check_int,
)
from chasqui.model.job import BackoffSpec, Job
from chasqui.model.keys import DEFAULT_GROUP, check_text, shown
from chasqui.producing.job_options import BackoffLike
from chasqui.producing.tracing import Tracing

#: What runs a job: a coroutine function, or a plain one, which runs in a thread.
Handler: TypeAlias = Callable[[Job], Awaitable[Any]] | Callable[[Job], Any]
#: The same where `batch` is set.
BatchHandler: TypeAlias = Callable[[list[Job]], Awaitable[Any]] | Callable[[list[Job]], Any]

#: How many runs a job has if nobody says so.
MAX_ATTEMPTS: Final = 25
SHUTDOWN_DEADLINE_S: Final = 30.0
MAX_READ: Final = 1_000
#: Prefetched envelopes may take this much memory.
PREFETCH_BYTES: Final = 32 << 20
#: Each slot is a task of its own, opened when the worker starts.
MAX_CONCURRENCY: Final = 100_000
#: How many threads a worker has for plain functions, unless its owner says so.
MAX_THREADS: Final = 32

#: The lowest values of options that are numbers, where that is not 1.
_LOWEST: Final = {"prefetch": 0, "claim_min_idle_ms": 100, "batch_linger_ms": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """What `Consumer` and `Worker` both take, and the engine reads."""

    #: How many jobs run at once.
    concurrency: int = 100
    #: How many runs a job has that does not say so itself, the first one included. A mapping goes
    #: by name; jobs of other names have 25.
    max_attempts: Mapping[str, int] | int = MAX_ATTEMPTS
    #: How long a job waits for its retry that does not say so itself: as `backoff` of `Queue.add`,
    #: or a mapping by name. A mapping whose `kind` is a text is the dict form of one backoff, for
    #: all jobs. None: 100 ms, doubled from retry to retry up to 30 s, and up to 100 ms more.
    backoff: BackoffLike | Mapping[str, BackoffLike] | None = None
    #: How often a job may be delivered. None: as often as it may run, but at least three times.
    max_deliveries: int | None = None
    group: str = DEFAULT_GROUP
    #: The consumer's name in the group, which no other living worker may have. None: each worker
    #: makes up its own, so that several may share a config.
    consumer_id: str | None = None
    #: How long one read waits for jobs.
    read_block_ms: int = 5_000
    #: The most entries of one read; None lets the reader choose by how fast handlers are.
    read_count: int | None = None
    #: The most entries to hold beyond those that run; None lets the reader choose in the same way.
    prefetch: int | None = None
    #: The lease: how long an entry may lie without a sign of life before another worker takes it
    #: over. A heartbeat renews it at a third of that, so it says how fast a crash is noticed, not
    #: how long a handler may run.
    claim_min_idle_ms: int = 15_000
    #: A job with a larger payload is buried unread.
    max_payload_bytes: int = 1 << 20
    #: About how many dead jobs are kept; None keeps all.
    dlq_max_stream_len: int | None = None
    #: Whether it writes to the events stream.
    events_enabled: bool = True
    #: Whether finished jobs are kept, with their payloads.
    history: bool = False
    #: Whether it promotes delayed jobs, if it is the leader.
    delayed_enabled: bool = True
    #: Whether it fires repeatable jobs, if it is the leader.
    run_scheduler: bool = True
    #: How often it looks for repeatable jobs that are due; None: as often as `Scheduler` does.
    scheduler_tick_ms: int | None = None
    #: Whether it stores what handlers return, and for how long.
    store_results: bool = False
    result_ttl_ms: int = 3_600_000
    #: How long a drain waits for handlers.
    shutdown_deadline_s: float = SHUTDOWN_DEADLINE_S
    #: How many jobs a handler gets at once, as a list; None: one, and no list.
    batch: int | None = None
    #: How long a batch may wait to become full.
    batch_linger_ms: int = 50
    limits: Limits = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for option in fields(self):
            name, takes_none = option.name, option.default is None
            if option.type in (int, int | None):
                high = MAX_MS if name.endswith("_ms") else MAX_COUNT
                value, low = getattr(self, name), _LOWEST.get(name, 1)
                check_int(name, value, low, high, takes_none=takes_none)
        check_int("concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        if not isinstance(self.history, bool):
            raise TypeError(f"history must be a bool, got {type(self.history).__name__}")
        _check_name("group", self.group)
        if self.consumer_id is not None:
            _check_name("consumer_id", self.consumer_id)
        deadline_s: object = self.shutdown_deadline_s
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float):
            kind = type(deadline_s).__name__
            raise TypeError(f"shutdown_deadline_s must be seconds, got {kind}")
        if not 0 <= deadline_s <= MAX_MS / 1000:
            raise ValueError(
                f"shutdown_deadline_s must be from 0 to {MAX_MS // 1000}, got {shown(deadline_s)}"
            )
        object.__setattr__(self, "limits", self._limits())

    def _limits(self) -> Limits:
        attempts = self.max_attempts
        _check_numbers("max_attempts", attempts, MAX_COUNT, self.batch, takes_none=False)
        most = MAX_ATTEMPTS if isinstance(attempts, Mapping) else attempts
        backoff, backoffs = _backoffs(self.backoff, self.batch)
        return Limits(
            most,
            self.max_deliveries,
            backoff,
            dict(attempts) if isinstance(attempts, Mapping) else {},
            backoffs,
        )

    @property
    def consumer(self) -> str:
        """The name of the consumer in the group, which its owner has filled in."""
        assert self.consumer_id is not None
        return self.consumer_id


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ConsumerConfig):
    """The options of a `Worker`, checked when it is made. Several workers may share one."""

    #: None takes CHASQUI_URL or REDIS_URL from the environment, or a server on this machine.
    redis_url: str | None = field(default=None, repr=False)  # it may hold a password
    tls: bool = False
    credential_provider: CredentialProvider | None = field(default=None, repr=False)
    #: Runs the jobs whose names are not in the mapping of handlers.
    default: Handler | None = None
    #: How many plain functions run at once; None: as many as `concurrency`, but at most 32.
    threads: int | None = None
    #: How many processes a handler has of its own, for CPU-bound work; a mapping goes by name.
    processes: Mapping[str, int] | int | None = None
    #: How long one run may take; a mapping goes by name. A run over its time is cancelled and has
    #: failed. The wait for a thread or a process does not count. A thread cannot be stopped: its
    #: function goes on while the job is retried, but takes no slot and no thread of the pool.
    timeout_ms: Mapping[str, int] | int | None = None
    #: Hooks around each run, the first one outermost: coroutine functions that get the job and a
    #: function that runs it, `async def hook(job, run): return await run()`. They run on the event
    #: loop, wherever the handler runs, and may change the result, raise, or run it again. Their
    #: time counts for `timeout_ms` where the handler is a coroutine function. Not with `batch`.
    around: Sequence[Around] = ()
    metrics: MetricsSink | None = None
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        ConsumerConfig.__post_init__(self)  # `super` does not know a class with slots
        check_credential_provider(self.credential_provider)
        _check_numbers("processes", self.processes, MAX_COUNT, self.batch)
        _check_numbers("timeout_ms", self.timeout_ms, MAX_MS, self.batch)
        object.__setattr__(self, "around", check_hooks(self.around))
        if self.around and self.batch is not None:
            raise TypeError(
                "around cannot go with batch: a hook gets one job, and a batch handler many; do in "
                "the handler what the hooks would do"
            )


_Config = TypeVar("_Config", bound=ConsumerConfig)


def configure(config: _Config, options: Mapping[str, Any]) -> _Config:
    """The config of one consumer: with these options in it, but for those that are None, and with
    a consumer's name."""
    given = {name: value for name, value in options.items() if value is not None}
    name = config.consumer_id if config.consumer_id is not None else default_consumer_id()
    return replace(config, **{"consumer_id": name, **given})


def not_by_name(what: str, one: str) -> TypeError:
    """The error for an option that cannot be a mapping, since a batch holds jobs of all names."""
    return TypeError(
        f"{what} cannot go by name with batch: pass one {one}, for jobs of all names share a batch"
    )


def _check_numbers(
    what: str, numbers: object, high: int, batch: int | None, *, takes_none: bool = True
) -> None:
    """Check an option that is a number, or one for each name."""
    if not isinstance(numbers, Mapping):
        check_int(what, numbers, 1, high, takes_none=takes_none)
        return
    if batch is not None:
        raise not_by_name(what, "number")
    for name, number in numbers.items():
        check_int(f"{what}[{name!r}]", number, 1, high, takes_none=takes_none)


def _backoffs(given: Any, batch: int | None) -> tuple[Backoff, dict[str, Backoff]]:
    """The backoff of all jobs, and those that go by name."""
    if given is None:
        return Backoff(), {}
    # No backoff is a text, so a mapping by name has none for a job that is called "kind".
    if not isinstance(given, Mapping) or isinstance(given.get("kind"), str):
        return Backoff.of(BackoffSpec.parse(given)), {}
    if batch is not None:
        raise not_by_name("backoff", "backoff")
    is_one = all(
        name in BackoffSpec.__slots__ and not isinstance(one, BackoffSpec | Mapping)
        for name, one in given.items()
    )
    if given and is_one:
        raise ValueError("backoff.kind is required, unless backoff is a mapping by name")
    by_name = {}
    for name, one in given.items():
        try:
            by_name[name] = Backoff.of(BackoffSpec.parse(one))
        except (TypeError, ValueError) as error:
            raise type(error)(f"backoff[{name!r}]: {error}") from None
    return Backoff(), by_name


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name.strip() or len(name) > 256:
        raise ValueError(f"{what} must be a non-empty str of at most 256 characters")
    check_text(name, what)


def default_consumer_id() -> str:
    """A name that tells an operator where the consumer runs, and is never used twice."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
