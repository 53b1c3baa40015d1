"""The engine behind `Worker`: it wires the parts of a consumer, starts them and ends them.

Data flows one way: from the reader through the dispatcher to the acker and the relocator. What all
of them hold is in `Held`; the heartbeat keeps it ours, and the drain sees to it at the end.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from chasqui._core.entry import Entry
from chasqui._version import VERSION
from chasqui.consuming.acker import Acker
from chasqui.consuming.backlog import Backlog, backlog
from chasqui.consuming.batches import BatchDispatcher
from chasqui.consuming.config import ConsumerConfig
from chasqui.consuming.dispatcher import Dispatcher
from chasqui.consuming.drain import Drain
from chasqui.consuming.handlers import Handlers
from chasqui.consuming.heartbeat import Heartbeat
from chasqui.consuming.held import Held
from chasqui.consuming.history import History
from chasqui.consuming.reader import Reader
from chasqui.consuming.relocator import Relocator
from chasqui.consuming.shared_slots import Lane
from chasqui.consuming.sharing import (
    SharedBatchDispatcher,
    SharedDispatcher,
    SharedHeld,
    SharedReader,
)
from chasqui.errors import ChasquiError, NotSupportedError
from chasqui.events.writer import EventWriter
from chasqui.metrics import MetricsSink, guard
from chasqui.model import clock
from chasqui.model.config import CredentialProvider, Endpoint
from chasqui.model.keys import Keys
from chasqui.scripts.flowing import Bounds
from chasqui.scripts.settling import Consumer
from chasqui.timed.leader_loop import LeaderLoop
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.connection import Connection
from chasqui.transport.link import in_thread_or_here
from chasqui.transport.recovery import SharedDialPacing
from chasqui.transport.request import Effect, commands
from chasqui.transport.server import eviction_policy

logger = logging.getLogger(__name__)

#: How long the heartbeat may take to end after the drain: it may be looking up a name.
HEARTBEAT_END_S: Final = 1.0
#: How many handlers the log names when a worker starts.
SHOWN_HANDLERS: Final = 10
#: How long a leader loop that failed waits before it is started again.
LOOP_AGAIN_MIN_S, LOOP_AGAIN_MAX_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Health:
    """How a worker is doing, at one moment."""

    is_connected: bool
    #: Seconds since a read last came back, even an empty one.
    last_read_age_s: float
    running: int
    prefetched: int
    oldest_running_s: float
    acks_waiting: int
    moves_waiting: int
    #: Entries that other workers took over while this one held them.
    lost: int
    #: Runs that are over, well or badly.
    finished: int
    #: Runs that the end of the drain cancelled.
    cut_short: int
    #: A part of the drain failed: the server may not know of everything that was done.
    is_incomplete: bool = False


class Engine:
    """One consumer of one queue."""

    def __init__(
        self,
        keys: Keys,
        endpoint: Endpoint,
        config: ConsumerConfig,
        handlers: Handlers,
        *,
        make_job: Callable[["Engine", Entry], Any],
        encode_result: Callable[[Any], bytes | None],
        encode_step_result: Callable[[Any], bytes | None],
        credential_provider: CredentialProvider | None = None,
        metrics: MetricsSink | None = None,
        lane: Lane | None = None,
    ) -> None:
        """With a `lane` it shares its slots with other queues of this process."""
        # Long because it wires every part of a worker, and does nothing else.
        self.keys = keys
        self.config = config
        self.metrics = guard(metrics)
        self._handlers = handlers
        self.held, dispatcher_kind, reader_kind = _kinds(keys.queue, config, lane)
        name = f"chasqui-worker:{keys.queue}"[:100]
        options: dict[str, Any] = {
            "key": keys.stream,
            "client_name": name,
            "credential_provider": credential_provider,
            "dial_pacing": SharedDialPacing(),
        }
        self._reading = Connection(endpoint, is_reader=True, **options)
        self.new_connection = functools.partial(Connection, endpoint, **options)
        self.connection = self.new_connection()
        self.events = EventWriter(self.connection, keys) if config.events_enabled else None
        self._history = History(self.connection, keys) if config.history else None
        self._consumer = Consumer(keys, config.group, config.consumer)
        settled = self.connection, self._consumer, self.held
        logs: dict[str, Any] = {"events": self.events, "history": self._history}
        bounds = Bounds(config.result_ttl_ms, config.max_payload_bytes, config.dlq_max_stream_len)
        self._acker = Acker(*settled, **logs, metrics=self.metrics, bounds=bounds)
        self._relocator = Relocator(*settled, **logs, bounds=bounds)
        if self.events is not None:
            self.events.on_due = self._acker.run_once
        self._dispatcher = dispatcher_kind(
            config,
            self.held,
            handlers,
            self._acker,
            self._relocator,
            self.events,
            self.metrics,
            queue=keys.queue,
            make_job=functools.partial(make_job, self),
            encode_result=encode_result,
            encode_step_result=encode_step_result,
            on_exit=self.stop,
        )
        self._reader = reader_kind(
            self._reading,
            self._consumer,
            config,
            self.held,
            offer=self._dispatcher.offer,
            events=self.events,
        )
        self._heartbeat = Heartbeat(
            BlockingConnection(endpoint, **options), self._consumer, self.held
        )
        self._drain = Drain(
            *settled,
            reader=self._reader,
            dispatcher=self._dispatcher,
            settlers=(self._acker, self._relocator),
            events=self.events,
            shutdown_deadline_s=config.shutdown_deadline_s,
        )
        self._stop = asyncio.Event()
        self._is_drained = False
        self.is_running = False

    def stop(self) -> None:
        """Begin the drain; `run` returns when it is over."""
        self._stop.set()

    def cancel(self) -> None:
        """The same, without much patience for a server that is gone."""
        self._stop.set()
        self._drain.hurry()

    def stop_now(self) -> None:
        """Cut the drain short: handlers that still run are cancelled."""
        self._stop.set()
        self._drain.cut_short()

    @property
    def exit(self) -> BaseException | None:
        """SystemExit or KeyboardInterrupt, if a handler raised that: the engine stopped for it."""
        return self._dispatcher.exit

    async def run(self, *beside: Callable[["Engine"], LeaderLoop]) -> None:
        """Consume until `stop`, then drain. `beside` makes the leader loops that run with it."""
        loop = asyncio.get_running_loop()
        self.is_running = True
        current = asyncio.current_task()
        assert current is not None
        tasks: list[asyncio.Task[Any]] = []
        try:
            if not await self._connect():
                return
            self._log_start()
            self.held.renewed(clock.boot_s())
            self._heartbeat.start(loop)
            self._dispatcher.start(current)
            reading = loop.create_task(self._reader.run())
            leader_loops = [loop.create_task(self._attend(make)) for make in beside]
            tasks = [reading, *leader_loops]
            await self._stop.wait()
            await self._drain.run(reading, self._reading, leader_loops)
            self._is_drained = True
        finally:
            await _undisturbed(self._let_go(tasks))

    def _log_start(self) -> None:
        """Log what runs, with what and where: the first questions when something is wrong."""
        names, server = self._handlers.names, self.connection.server
        shown = ", ".join(names[:SHOWN_HANDLERS])
        more = len(names) - SHOWN_HANDLERS
        fields = {
            "queue": self.keys.queue,
            "server_version": str(self.connection.profile).capitalize(),
            "server": f"{server}/{server.db}" if server.hosts else str(server),
            "handlers": f"{shown} and {more} more" if more > 0 else shown,
            "concurrency": self.config.concurrency,
            "version": VERSION,
            "consumer_id": self.config.consumer,
        }
        logger.info(
            "queue %s: worker started on %s at %s; handlers: %s; concurrency %d; chasqui %s",
            *list(fields.values())[:-1],
            extra=fields,
        )

    async def _let_go(self, tasks: list[asyncio.Task[Any]]) -> None:
        """End everything that the engine started."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._is_drained:
            await self._dispatcher.stop(0)  # cancelled ourselves: nothing may run on
        await asyncio.gather(self._stop_heartbeat(), self._handlers.close())
        self._drain.report_given_up()
        parts = self._dispatcher, self._acker, self._relocator, self._reader, self._history
        for part in parts:
            if part is not None:
                part.log.close()
        await self._reading.close()
        await self.connection.close()
        self.is_running = False

    async def _stop_heartbeat(self) -> None:
        try:
            async with asyncio.timeout(HEARTBEAT_END_S):
                await in_thread_or_here(self._heartbeat.stop)
        except TimeoutError:
            queue = self.keys.queue
            # A silent server is in the log by now.
            logger.log(
                logging.DEBUG if self._drain.is_incomplete else logging.WARNING,
                "queue %s: the heartbeat hangs and is left behind",
                queue,
                extra={"queue": queue},
            )

    async def _attend(self, make: Callable[["Engine"], LeaderLoop]) -> None:
        """Run a leader loop until no handler runs any more, and start it again if it fails."""
        wait_s = LOOP_AGAIN_MIN_S
        ending = self._drain.are_handlers_done
        while not ending.is_set():
            leader_loop = make(self)
            try:
                await leader_loop.run(ending)
            except Exception:
                fields = {"queue": self.keys.queue, "duty": leader_loop.name}
                logger.exception(
                    "queue %s: the %s ended and is started again", *fields.values(), extra=fields
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ending.wait(), wait_s)
                wait_s = min(wait_s * 2, LOOP_AGAIN_MAX_S)

    async def _connect(self) -> bool:
        """Make the first connection: a wrong URL or password is an error, not something to wait
        out. False if the worker was stopped before that."""
        greeting = asyncio.ensure_future(self._greet())
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({greeting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if greeting.done():
                greeting.result()
            return greeting.done()
        finally:
            greeting.cancel()
            stopped.cancel()

    async def _greet(self) -> None:
        await self.connection.connect()
        try:
            await self._reader.join()
        except NotSupportedError:
            raise
        except ChasquiError as error:  # the reader tries again
            logger.debug("no group yet: %s", error, extra={"queue": self.keys.queue})
        # Where INFO is refused the log says nothing: the server has users, so it has an operator.
        info = commands(("INFO", "memory"), effect=Effect.READ, raises=False)
        policy = eviction_policy(await self.connection.submit(info))
        if policy not in ("noeviction", "unknown"):
            queue = self.keys.queue
            logger.warning(
                "queue %s: its server has maxmemory-policy %s: when it is full it may drop jobs",
                queue,
                policy,
                extra={"queue": queue},
            )

    # ── For those who wait until all is done ────────────────────────────────────────────────────

    def on_quiet(self, call: Callable[[], None]) -> None:
        """Call this whenever the last of the runs here is over."""
        self._dispatcher.on_quiet = call

    @property
    def is_at_work(self) -> bool:
        """Whether entries wait or run here."""
        return bool(self.held.waiting or self.held.running)

    async def settle(self) -> None:
        """Wait until the server has confirmed how all runs ended."""
        for settler in (self._acker, self._relocator):
            await settler.drain()

    async def backlog(self, soon_ms: int) -> Backlog:
        """What the queue still has to run."""
        lease_ms = self.config.claim_min_idle_ms
        return await self.connection.run(backlog(self._consumer, soon_ms, lease_ms))

    def health(self) -> Health:
        return Health(
            is_connected=self._reading.is_connected and self.connection.is_connected,
            last_read_age_s=time.monotonic() - self._reader.last_read_s,
            running=self.held.running,
            prefetched=len(self.held.waiting),
            oldest_running_s=self.held.oldest_running_s(),
            acks_waiting=self._acker.waiting,
            moves_waiting=self._relocator.waiting,
            lost=self.held.lost_count,
            finished=self.held.finished,
            cut_short=len(self._dispatcher.cut_short),
            is_incomplete=self._drain.is_incomplete,
        )


def _kinds(
    queue: str, config: ConsumerConfig, lane: Lane | None
) -> tuple[Held, type[Dispatcher], type[Reader]]:
    """What is in hand, and the classes of dispatcher and reader: a worker that does not share its
    slots pays nothing for those that do."""
    lease_s, batch = config.claim_min_idle_ms / 1000, config.batch or 1
    if lane is not None:
        shared = SharedDispatcher if config.batch is None else SharedBatchDispatcher
        return SharedHeld(queue, lease_s, batch, config.limits, lane), shared, SharedReader
    kind = Dispatcher if config.batch is None else BatchDispatcher
    return Held(queue, lease_s, batch, config.limits), kind, Reader


async def _undisturbed(work: Coroutine[Any, Any, None]) -> None:
    """Wait until some work is over. Cancelled meanwhile, however often, raise that only then."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    task.result()
    if is_cancelled:
        raise asyncio.CancelledError
