"""Worker and Consumer: what programs run to process jobs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from chasqui._core.entry import Entry
from chasqui.consuming.around import Around
from chasqui.consuming.config import (
    MAX_THREADS,
    BatchHandler,
    ConsumerConfig,
    Handler,
    WorkerConfig,
    configure,
    not_by_name,
)
from chasqui.consuming.engine import Engine, Health
from chasqui.consuming.handlers import Handlers
from chasqui.consuming.shared_slots import Lane, SharedSlots
from chasqui.consuming.traced import TracedHandlers
from chasqui.errors import UnreadableError
from chasqui.metrics import MetricsSink
from chasqui.model import payload
from chasqui.model.config import CredentialProvider, Endpoint, check_credential_provider
from chasqui.model.job import Job
from chasqui.model.keys import Keys
from chasqui.producing.job_options import BackoffLike
from chasqui.producing.tracing import Tracing
from chasqui.timed.leader_loop import LeaderLoop
from chasqui.timed.promoter import PromoterConfig, PromoterLoop
from chasqui.timed.scheduler import SchedulerConfig, SchedulerLoop

__all__ = ["Consumer", "Handler", "RawJob", "Worker", "WorkerConfig"]


class Worker:
    """Runs the jobs of one queue.

    `handler` is one function for all jobs or a mapping of names to functions. `WorkerConfig`
    explains the options. Give them as keywords, as a `config`, or as both: then a keyword replaces
    what the config says. A keyword that is None counts as not given.
    """

    # Long by its parameters alone, which are listed for people and for type checkers.
    def __init__(
        self,
        queue_name: str,
        handler: Handler | BatchHandler | Mapping[str, Handler],
        *,
        config: WorkerConfig | None = None,
        redis_url: str | None = None,
        tls: bool | None = None,
        concurrency: int | None = None,
        max_attempts: Mapping[str, int] | int | None = None,
        backoff: BackoffLike | Mapping[str, BackoffLike] | None = None,
        group: str | None = None,
        consumer_id: str | None = None,
        read_block_ms: int | None = None,
        read_count: int | None = None,
        claim_min_idle_ms: int | None = None,
        max_payload_bytes: int | None = None,
        dlq_max_stream_len: int | None = None,
        events_enabled: bool | None = None,
        delayed_enabled: bool | None = None,
        run_scheduler: bool | None = None,
        scheduler_tick_ms: int | None = None,
        store_results: bool | None = None,
        result_ttl_ms: int | None = None,
        credential_provider: CredentialProvider | None = None,
        default: Handler | None = None,
        threads: int | None = None,
        processes: Mapping[str, int] | int | None = None,
        timeout_ms: Mapping[str, int] | int | None = None,
        batch: int | None = None,
        batch_linger_ms: int | None = None,
        prefetch: int | None = None,
        max_deliveries: int | None = None,
        shutdown_deadline_s: float | None = None,
        around: Sequence[Around] | None = None,
        metrics: MetricsSink | None = None,
        tracing: Tracing | None = None,
        history: bool | None = None,
    ) -> None:
        options = {**locals()}  # the parameters, for there is nothing else yet
        for name in ("self", "queue_name", "handler", "config"):
            del options[name]
        if config is not None and not isinstance(config, WorkerConfig):
            raise TypeError(f"config must be a WorkerConfig, got {type(config).__name__}")
        self._config = config = configure(config or WorkerConfig(), options)
        self._keys = Keys(queue_name)
        self.name = queue_name
        self._endpoint = Endpoint.parse(config.redis_url, tls=config.tls)
        if config.batch is not None and isinstance(handler, Mapping):
            raise not_by_name("handler", "function")
        self._handlers: Handlers = Handlers(
            handler,
            default=config.default,
            threads=config.threads or min(config.concurrency, MAX_THREADS),
            processes=config.processes,
            timeout_ms=config.timeout_ms,
            by_name={
                "max_attempts": config.limits.attempts_by_name,
                "backoff": config.limits.backoff_by_name,
            },
            around=config.around,
            queue=queue_name,
        )
        if (capacity := self._handlers.capacity) is not None:
            # No slot waits for a thread or a process: another worker may have one for the job.
            slots = min(config.concurrency, capacity)
            self._config = replace(config, concurrency=slots)
        self._make_job: Callable[[Engine, Entry], Any] = _make_job
        if config.tracing is not None:
            traced = TracedHandlers(self._handlers, config.tracing, queue_name, config.group)
            self._handlers, self._make_job = traced, traced.make_job(_make_job)
        self._engine: Engine | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False
        self._lane: Lane | None = None

    def share(self, slots: SharedSlots) -> None:
        """Share slots with other workers on the same event loop, from the beginning of `run`. Its
        own `concurrency` still limits how many of them it has."""
        if self._running is not None:
            raise RuntimeError(f"the worker of queue {self.name} runs already")
        self._lane = slots.lane(self.name)
        concurrency = min(self._config.concurrency, slots.total)
        self._config = replace(self._config, concurrency=concurrency)

    @property
    def consumer_id(self) -> str:
        """Its name in the group."""
        return self._config.consumer

    @property
    def consumer_ids(self) -> tuple[str, ...]:
        """The same as `WorkerGroup.consumer_ids`."""
        return (self._config.consumer,)

    @property
    def label(self) -> str:
        """How log lines call it."""
        return f"queue {self.name}"

    @property
    def concurrency(self) -> int:
        """How many jobs it runs at once, at most."""
        return self._config.concurrency

    @property
    def server(self) -> str:
        """Where its server is, without credentials."""
        endpoint = self._endpoint
        return f"{endpoint}/{endpoint.db}" if endpoint.hosts else str(endpoint)

    @property
    def shutdown_deadline_s(self) -> float:
        """How long the drain waits for handlers."""
        return self._config.shutdown_deadline_s

    @property
    def engine(self) -> Engine | None:
        """What does the work; None before `run`. Not for programs: it changes as chasqui does."""
        return self._engine

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it runs on; None before `run`."""
        return None if self._running is None else self._running.get_loop()

    async def run(self) -> None:
        """Run jobs until `close()`; returns when drained. A second call awaits the first."""
        if self._running is None:
            if self._is_closed:
                return
            config = self._config
            self._engine = Engine(
                self._keys,
                self._endpoint,
                config,
                self._handlers,
                make_job=self._make_job,
                encode_result=_encode_result if config.store_results else _no_result,
                encode_step_result=_encode_result,
                credential_provider=config.credential_provider,
                metrics=config.metrics,
                lane=self._lane,
            )
            loops = leader_loops(config, config.metrics)
            self._running = asyncio.ensure_future(self._engine.run(*loops))
        assert self._engine is not None
        await _to_the_end(self._engine, self._running)

    async def close(self) -> None:
        """Begin the drain; `run` returns when it is over. A second call does nothing."""
        self._is_closed = True
        if self._engine is not None:
            self._engine.stop()

    def stop_now(self) -> None:
        """Cut the drain short: cancel handlers that still run, and give their jobs back."""
        self._is_closed = True
        if self._engine is not None:
            self._engine.stop_now()

    def health(self) -> Health | None:
        """How it is doing; None before `run`."""
        return None if self._engine is None else self._engine.health()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)


class Consumer:
    """A worker without the payload codec: jobs carry bytes, the handler returns bytes or None."""

    def __init__(
        self,
        redis_url: str | None,
        queue_name: str,
        *,
        concurrency: int = 1,
        max_attempts: int = 25,
        credential_provider: CredentialProvider | None = None,
        metrics: MetricsSink | None = None,
        tls: bool = False,
        **options: Any,
    ) -> None:
        """`options` are those of `Worker` that are about reading, leases, retries and results."""
        check_credential_provider(credential_provider)
        self._keys = Keys(queue_name)
        self._endpoint = Endpoint.parse(redis_url, tls=tls)
        options = {"concurrency": concurrency, "max_attempts": max_attempts, **options}
        self._config = configure(ConsumerConfig(), options)
        self._credential_provider = credential_provider
        self._metrics = metrics
        self._engine: Engine | None = None
        self._is_stopped = False

    async def run(self, handler: Callable[["RawJob"], Any]) -> None:
        """Run jobs until `shutdown()`; returns when drained."""
        if self._engine is not None:
            raise RuntimeError("this consumer was run already")
        if self._is_stopped:
            return
        engine = self._engine = Engine(
            self._keys,
            self._endpoint,
            self._config,
            Handlers(handler, threads=min(self._config.concurrency, MAX_THREADS)),
            make_job=_make_raw_job,
            encode_result=_raw_result if self._config.store_results else _no_result,
            encode_step_result=_raw_step_result,
            credential_provider=self._credential_provider,
            metrics=self._metrics,
        )
        running = asyncio.ensure_future(engine.run(*leader_loops(self._config, self._metrics)))
        await _to_the_end(engine, running)

    def shutdown(self) -> None:
        """Begin the drain. A second call does nothing."""
        self._is_stopped = True
        if self._engine is not None:
            self._engine.stop()


@dataclass(frozen=True, slots=True)
class RawJob:
    """A job of a `Consumer`, with its payload as it was added."""

    id: str
    name: str
    payload: bytes
    created_at_ms: int
    attempt: int


async def _to_the_end(engine: Engine, running: asyncio.Task[None]) -> None:
    """Wait for a run. If cancelled, drain first; a second cancellation stops it at once."""
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            engine.cancel()
            await asyncio.gather(running, return_exceptions=True)
        raise
    if engine.exit is not None:
        # Raised here and not in the engine's own task, where it would break the loop.
        raise engine.exit


def leader_loops(
    config: ConsumerConfig, metrics: MetricsSink | None
) -> list[Callable[[Engine], LeaderLoop]]:
    """Makers of the loops that run beside the engine: promoter and scheduler, as configured."""

    def maker(
        kind: type[PromoterLoop] | type[SchedulerLoop], options: Any
    ) -> Callable[[Engine], LeaderLoop]:
        return lambda engine: kind(
            engine.keys,
            engine.connection,
            engine.new_connection(),
            options,
            holder_id=config.consumer,
            metrics=metrics,
        )

    makers = []
    if config.delayed_enabled:
        makers.append(maker(PromoterLoop, PromoterConfig(has_events=config.events_enabled)))
    if config.run_scheduler:
        tick_ms = config.scheduler_tick_ms or SchedulerConfig().tick_interval_ms
        makers.append(maker(SchedulerLoop, SchedulerConfig(tick_interval_ms=tick_ms)))
    return makers


def _make_job(engine: Engine, entry: Entry) -> Job:
    try:
        data = entry.unpack()
    except ValueError as error:
        raise UnreadableError(f"the payload does not decode: {error}") from None
    return Job(
        entry.job_id,
        entry.name,
        data,
        entry.attempt,
        entry.created_at_ms,
        True,
        None,
        (engine.held, entry),
    )


def _encode_result(result: Any) -> bytes | None:
    return None if result is None else payload.encode(result, root="result")


def _no_result(result: Any) -> bytes | None:
    return None


def _make_raw_job(engine: Engine, entry: Entry) -> RawJob:
    return RawJob(entry.job_id, entry.name, entry.payload, entry.created_at_ms, entry.attempt)


def _raw_result(result: Any) -> bytes | None:
    if result is None or type(result) is bytes:
        return result
    raise TypeError(f"a Consumer's handler must return bytes or None, got {type(result).__name__}")


def _raw_step_result(result: Any) -> bytes | None:
    """The same for a step of a flow: the bytes become part of the next step's payload."""
    encoded = _raw_result(result)
    if encoded is not None:
        payload.decode(encoded)
    return encoded
