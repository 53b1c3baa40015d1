"""Worker and Consumer: what programs run to have their jobs done."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeAlias

from chasqui import payload
from chasqui._core.entry import Entry
from chasqui.model.config import CredentialProvider, Endpoint, check_credential_provider
from chasqui.consumer import Engine, Health
from chasqui.consumer.config import ConsumerConfig, make_config
from chasqui.consumer.dispatcher import UnreadableError
from chasqui.consuming.handlers import Handlers
from chasqui.consuming.traced import TracedHandlers
from chasqui.timed.leader_loop import Duty
from chasqui.model.job import Job
from chasqui.model.keys import Keys
from chasqui.metrics import MetricsSink
from chasqui.promoter import PromoterConfig, PromoterDuty
from chasqui.timed.scheduler import SchedulerConfig, SchedulerDuty
from chasqui.producing.tracing import Tracing

#: What runs a job: a coroutine function, or a plain one, which runs in a thread.
Handler: TypeAlias = Callable[[Job], Awaitable[Any]] | Callable[[Job], Any]


class Worker:
    """Runs the jobs of one queue.

    `handler` is one function for all jobs or a mapping of names to functions, with `default` for
    the names that are not in it. With `batch` it gets a list of up to so many jobs, and may raise
    BatchError for some of them. Plain functions run in `threads`, or in `processes` (a number, or
    a mapping of names to numbers). A run over `timeout_ms` is cancelled and counts as failed; to
    wait for a thread or a process is not part of it. A thread cannot be stopped, so its function
    goes on while the job is retried, without a slot or a place in the pool. With `history` each
    finished job is kept, with what it carried, for `chasqui spark archive --payloads`.
    """

    def __init__(
        self,
        queue_name: str,
        handler: Handler | Mapping[str, Handler],
        *,
        redis_url: str | None = None,
        tls: bool = False,
        concurrency: int = 100,
        max_attempts: int = 25,
        group: str = "default",
        consumer_id: str | None = None,
        read_block_ms: int | None = None,
        read_count: int | None = None,
        claim_min_idle_ms: int | None = None,
        max_payload_bytes: int | None = None,
        dlq_max_stream_len: int | None = None,
        events_enabled: bool = True,
        delayed_enabled: bool = True,
        run_scheduler: bool = True,
        scheduler_tick_ms: int | None = None,
        store_results: bool = False,
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
        metrics: MetricsSink | None = None,
        tracing: Tracing | None = None,
        history: bool = False,
    ) -> None:
        check_credential_provider(credential_provider)
        self._keys = Keys(queue_name)
        self.name = queue_name
        self._endpoint = Endpoint.parse(redis_url, tls=tls)
        self._config = make_config(
            max_attempts=max_attempts,
            max_deliveries=max_deliveries,
            concurrency=concurrency,
            group=group,
            consumer_id=consumer_id,
            read_block_ms=read_block_ms,
            read_count=read_count,
            claim_min_idle_ms=claim_min_idle_ms,
            max_payload_bytes=max_payload_bytes,
            dlq_max_stream_len=dlq_max_stream_len,
            events_enabled=events_enabled,
            delayed_enabled=delayed_enabled,
            run_scheduler=run_scheduler,
            scheduler_tick_ms=scheduler_tick_ms,
            store_results=store_results,
            result_ttl_ms=result_ttl_ms,
            shutdown_deadline_s=shutdown_deadline_s,
            batch=batch,
            batch_linger_ms=batch_linger_ms,
            prefetch=prefetch,
            history=history,
        )
        if batch is not None:
            by_name = {"handler": handler, "processes": processes, "timeout_ms": timeout_ms}
            for what, given in by_name.items():
                if isinstance(given, Mapping):
                    one = "one function" if what == "handler" else "one number"
                    raise TypeError(
                        f"{what} cannot go by name with batch: pass {one}, for jobs of all names "
                        "share a batch"
                    )
        self._handlers: Handlers = Handlers(
            handler,
            default=default,
            threads=min(self._config.concurrency, 32) if threads is None else threads,
            processes=processes,
            timeout_ms=timeout_ms,
            queue=queue_name,
        )
        if (places := self._handlers.places) is not None:
            # No slot waits for a thread or a process: others may have one for the job.
            slots = min(self._config.concurrency, places)
            self._config = replace(self._config, concurrency=slots)
        self._make_job: Callable[[Engine, Entry], Any] = _make_job
        if tracing is not None:
            traced = TracedHandlers(self._handlers, tracing, queue_name, group)
            self._handlers, self._make_job = traced, traced.make_job(_make_job)
        self._credential_provider = credential_provider
        self._metrics = metrics
        self._engine: Engine | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def consumer_id(self) -> str:
        """Under which name it takes part in the group."""
        return self._config.consumer_id

    @property
    def shutdown_deadline_s(self) -> float:
        """How long the drain waits for handlers."""
        return self._config.shutdown_deadline_s

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
            self._engine = self._make_engine()
            self._running = asyncio.ensure_future(
                self._engine.run(*timed_work(self._config, self._metrics))
            )
        assert self._engine is not None
        await _to_the_end(self._engine, self._running)

    async def close(self) -> None:
        """Begin the drain: `run` returns when it is over. A second call does nothing."""
        self._is_closed = True
        if self._engine is not None:
            self._engine.stop()

    def stop_now(self) -> None:
        """Cut the drain short; handlers that still run are cancelled and their jobs go back."""
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

    def _make_engine(self) -> Engine:
        return Engine(
            self._keys,
            self._endpoint,
            self._config,
            self._handlers,
            make_job=self._make_job,
            encode_result=_encode_result if self._config.store_results else _no_result,
            credential_provider=self._credential_provider,
            metrics=self._metrics,
        )


class Consumer:
    """The engine without payload codec: its jobs carry bytes, its handler returns bytes or None."""

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
        self._config = make_config(max_attempts=max_attempts, concurrency=concurrency, **options)
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
            Handlers(handler, threads=min(self._config.concurrency, 32)),
            make_job=_make_raw_job,
            encode_result=_raw_result if self._config.store_results else _no_result,
            credential_provider=self._credential_provider,
            metrics=self._metrics,
        )
        running = asyncio.ensure_future(engine.run(*timed_work(self._config, self._metrics)))
        await _to_the_end(engine, running)

    def shutdown(self) -> None:
        """Begin the drain. A second call does nothing."""
        self._is_stopped = True
        if self._engine is not None:
            self._engine.stop()


@dataclass(frozen=True, slots=True)
class RawJob:
    """A job of `Consumer`: its payload is as it was added."""

    id: str
    name: str
    payload: bytes
    created_at_ms: int
    attempt: int


async def _to_the_end(engine: Engine, running: asyncio.Task[None]) -> None:
    """Wait for a run; cancelled, let it drain first. A second cancellation stops it at once."""
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            engine.cancel()
            await asyncio.gather(running, return_exceptions=True)
        raise
    if engine.exit is not None:
        # Not raised in the engine's own task: that would break the loop instead of reaching us.
        raise engine.exit


def timed_work(
    config: ConsumerConfig, metrics: MetricsSink | None
) -> list[Callable[[Engine], Duty]]:
    """What makes the duties that run beside the engine: promoter and scheduler, as configured."""
    promoter = PromoterConfig(has_events=config.events_enabled)
    scheduler = SchedulerConfig()
    if config.scheduler_tick_ms is not None:
        scheduler = SchedulerConfig(tick_interval_ms=config.scheduler_tick_ms)

    def make_promoter(engine: Engine) -> Duty:
        return PromoterDuty(
            engine.keys,
            engine.connection,
            engine.new_connection(),
            promoter,
            holder_id=config.consumer_id,
            metrics=metrics,
        )

    def make_scheduler(engine: Engine) -> Duty:
        return SchedulerDuty(
            engine.keys,
            engine.connection,
            engine.new_connection(),
            scheduler,
            holder_id=config.consumer_id,
            metrics=metrics,
        )

    makers: list[Callable[[Engine], Duty]] = []
    if config.delayed_enabled:
        makers.append(make_promoter)
    if config.run_scheduler:
        makers.append(make_scheduler)
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
        (engine.holdings, entry.id),
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
