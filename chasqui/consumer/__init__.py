"""The engine behind `Worker`: data flows one way, from the reader through the dispatcher to the
acker and the relocator; the heartbeat watches over what is in hand. Wired here."""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from chasqui import clock
from chasqui._core.entry import Entry
from chasqui._version import VERSION
from chasqui.blocking import BlockingConnection
from chasqui.model.config import CredentialProvider, Endpoint
from chasqui.transport.connection import Connection
from chasqui.consumer.acker import Acker
from chasqui.consuming.batches import BatchDispatcher
from chasqui.consumer.config import ConsumerConfig
from chasqui.consumer.dispatcher import Dispatcher
from chasqui.consuming.handlers import Handlers
from chasqui.consuming.heartbeat import Heartbeat
from chasqui.consuming.history import History
from chasqui.consumer.holdings import Holdings
from chasqui.consumer.reader import Reader, release
from chasqui.consumer.relocator import Relocator
from chasqui.managing.consumers import leave
from chasqui.timed.leader_loop import Duty
from chasqui.errors import ChasquiError, NotSupportedError
from chasqui.events.writer import EventWriter
from chasqui.model.keys import Keys
from chasqui.transport.link import in_thread_or_here
from chasqui.metrics import MetricsSink, guard
from chasqui.transport.recovery import Search
from chasqui.transport.request import Effect, commands
from chasqui.transport.server import eviction_policy
from chasqui.model.words import count

logger = logging.getLogger(__name__)

#: How long a drain may take beyond its handlers, for all of acks, moves and leadership.
FLUSH_DEADLINE_S = 4.0
#: How long the heartbeat may take to end after that: it may be looking up a name.
HEARTBEAT_END_S = 1.0
#: How long a drain that was cancelled waits, in all, for a server that is gone.
CANCELLED_S = 1.0
#: How long it may take to leave the group of a server that answers.
LEAVE_S = 1.0
#: How many handlers a worker names when it starts.
TOLD_NAMES = 10
#: How long a duty that ended by an error waits before it begins anew.
DUTY_AGAIN_MIN_S, DUTY_AGAIN_MAX_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Health:
    """How a worker is doing, at one moment."""

    is_connected: bool
    #: Since a read last came back, even an empty one.
    last_read_age_s: float
    running: int
    prefetched: int
    oldest_running_s: float
    acks_waiting: int
    moves_waiting: int
    #: Entries that others took over while they were in hand.
    lost: int
    #: Runs that are over, well or badly.
    finished: int
    #: Runs that the end of the drain cancelled.
    cut_short: int
    #: The drain is over, and the server may not know of all that was done.
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
        credential_provider: CredentialProvider | None = None,
        metrics: MetricsSink | None = None,
    ) -> None:
        self.keys = keys
        self.config = config
        self.metrics = guard(metrics)
        self._handlers = handlers
        self.holdings = Holdings(config.claim_min_idle_ms / 1000)
        name = f"chasqui-worker:{keys.queue}"[:100]
        options: dict[str, Any] = {
            "key": keys.stream,
            "client_name": name,
            "credential_provider": credential_provider,
            "search": Search(),
        }
        self._reading = Connection(endpoint, is_reader=True, **options)
        self.new_connection = functools.partial(Connection, endpoint, **options)
        self.connection = self.new_connection()
        self.events = EventWriter(self.connection, keys) if config.events_enabled else None
        self._history = History(self.connection, keys) if config.history else None
        shared: dict[str, Any] = {
            "history": self._history,
            "holdings": self.holdings,
            "on_lost": self._lost,
            "on_missing": self._look_again,
        }
        names = (self.connection, keys, config.group, config.consumer_id)
        self._acker = Acker(
            *names, config.result_ttl_ms, **shared, events=self.events, metrics=self.metrics
        )
        self._relocator = Relocator(*names, config.dlq_max_stream_len, **shared, events=self.events)
        if self.events is not None:
            self.events.on_due = self._acker.run_once
        kind = Dispatcher if config.batch is None else BatchDispatcher
        self._dispatcher = kind(
            config,
            self.holdings,
            handlers,
            self._acker,
            self._relocator,
            self.events,
            self.metrics,
            queue=keys.queue,
            make_job=functools.partial(make_job, self),
            encode_result=encode_result,
        )
        self._reader = Reader(
            self._reading,
            keys,
            config,
            self.holdings,
            offer=self._dispatcher.offer,
            idle_slots=self._dispatcher.idle_slots,
            finished=lambda: self._dispatcher.finished,
            unsettled=lambda: self._acker.waiting + self._relocator.waiting,
            on_drained=self._drained,
        )
        self._dispatcher.on_low = self._reader.wake
        self._dispatcher.on_exit = self.stop
        self._dispatcher.on_let_go = self._look_again
        self._dispatcher.on_lapsed = lambda: self._heartbeat.beat_now()
        self._heartbeat = Heartbeat(
            BlockingConnection(endpoint, **options),
            keys,
            config.group,
            config.consumer_id,
            self.holdings,
            self._lost_in_thread,
        )
        self._stop = asyncio.Event()
        self._end_duties = asyncio.Event()
        self._is_cut_short = asyncio.Event()
        #: When the drain is over, come what may, by the monotonic clock.
        self._ends_s = math.inf
        self._is_drained = False
        #: How long the drain still waits for a server that is gone, and the wait that goes on.
        self._patience_s = math.inf
        self._waiting: asyncio.Timeout | None = None
        #: A link may be open to a server that says nothing.
        self._is_silent = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_running = False
        self._lost_count = 0
        #: A part of the drain failed, and that was told.
        self._is_incomplete = False

    def stop(self) -> None:
        """Begin the drain; `run` returns when it is over."""
        self._stop.set()

    def cancel(self) -> None:
        """The same, without much patience for a server that is gone: what it does not know of is
        given up."""
        self._stop.set()
        self._patience_s = CANCELLED_S
        waiting = self._waiting
        if waiting is not None and not waiting.expired() and not self.connection.is_connected:
            at_s = asyncio.get_running_loop().time() + CANCELLED_S
            waiting.reschedule(min(at_s, waiting.when() or at_s))

    def stop_now(self) -> None:
        """Cut the drain short: handlers that still run are cancelled."""
        self._stop.set()
        self._is_cut_short.set()
        self._ends_s = min(self._ends_s, time.monotonic() + FLUSH_DEADLINE_S)

    @property
    def exit(self) -> BaseException | None:
        """SystemExit or KeyboardInterrupt, if a handler raised that: the engine stopped for it."""
        return self._dispatcher.exit

    async def run(self, *beside: Callable[["Engine"], Duty]) -> None:
        """Consume until `stop`, then drain. `beside` make the duties that run along."""
        self._loop = asyncio.get_running_loop()
        self.is_running = True
        current = asyncio.current_task()
        assert current is not None
        self._dispatcher.is_ending = lambda: current.cancelling() > 0
        tasks: list[asyncio.Task[Any]] = []
        try:
            if not await self._connect():
                return
            self._tell_start()
            self.holdings.renewed(clock.boot_s())
            self._heartbeat.start()
            self._dispatcher.start()
            reading = self._loop.create_task(self._reader.run())
            duties = [self._loop.create_task(self._attend(make)) for make in beside]
            tasks = [reading, *duties]
            await self._stop.wait()
            await self._drain(reading)
            if duties:
                await asyncio.wait(duties, timeout=self._limit_s(FLUSH_DEADLINE_S))
            self._is_drained = True
        finally:
            await _undisturbed(self._let_go(tasks))

    def _tell_start(self) -> None:
        """Log what runs, with what and where: the first questions when something is wrong."""
        names, server = self._handlers.names, self.connection.server
        shown = ", ".join(names[:TOLD_NAMES])
        more = len(names) - TOLD_NAMES
        fields = {
            "queue": self.keys.queue,
            "server_version": str(self.connection.profile).capitalize(),
            "server": f"{server}/{server.db}" if server.hosts else str(server),
            "handlers": f"{shown} and {more} more" if more > 0 else shown,
            "concurrency": self.config.concurrency,
            "version": VERSION,
            "consumer_id": self.config.consumer_id,
        }
        logger.info(
            "queue %s: worker started on %s at %s; handlers: %s; concurrency %d; chasqui %s",
            *list(fields.values())[:-1],
            extra=fields,
        )

    async def _let_go(self, tasks: list[asyncio.Task[Any]]) -> None:
        """End all that the engine has begun."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._is_drained:
            await self._dispatcher.stop(0)  # cancelled ourselves: nothing may run on
        await asyncio.gather(self._stop_heartbeat(), self._handlers.close())
        self._tell_given_up()
        parts = self._dispatcher, self._acker, self._relocator, self._reader, self._history
        for part in parts:
            if part is not None:
                part.complaints.close()
        await self._reading.close()
        await self.connection.close()
        self.is_running = False

    async def _stop_heartbeat(self) -> None:
        try:
            async with asyncio.timeout(HEARTBEAT_END_S):
                await in_thread_or_here(self._heartbeat.stop)
        except TimeoutError:
            queue = self.keys.queue
            # Of a silent server everybody has heard by now.
            logger.log(
                logging.DEBUG if self._is_incomplete else logging.WARNING,
                "queue %s: the heartbeat hangs and is left behind",
                queue,
                extra={"queue": queue},
            )

    async def _attend(self, make: Callable[["Engine"], Duty]) -> None:
        """See that a duty is done until the drain is over, whatever happens to it."""
        wait_s = DUTY_AGAIN_MIN_S
        while not self._end_duties.is_set():
            duty = make(self)
            try:
                await duty.run(self._end_duties)
            except Exception:
                fields = {"queue": self.keys.queue, "duty": duty.name}
                logger.exception(
                    "queue %s: the %s ended and is started again", *fields.values(), extra=fields
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._end_duties.wait(), wait_s)
                wait_s = min(wait_s * 2, DUTY_AGAIN_MAX_S)

    async def _connect(self) -> bool:
        """The first connection: a wrong URL or password is an error, not something to wait out.
        False if it was stopped before that came about."""
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
        # Where INFO is refused nothing is said: whoever sets up users knows the server.
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

    async def _drain(self, reading: asyncio.Task[None]) -> None:
        """Stop reading, hand back what has not begun, finish what has, flush."""
        self._stop.set()
        patience_s = 0.0 if self._is_cut_short.is_set() else self.config.shutdown_deadline_s
        deadline_s = time.monotonic() + patience_s
        self._ends_s = min(self._ends_s, deadline_s + FLUSH_DEADLINE_S)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        # The read may have delivered entries in a reply that we no longer wait for: whatever the
        # server counts as ours and does not run goes back.
        await self._reading.close()
        held = self.holdings.ids()
        self.holdings.waiting.clear()
        # Handlers keep to their deadline whatever the server does.
        async with asyncio.TaskGroup() as group:
            group.create_task(self._best_effort(self._hand_back(held), FLUSH_DEADLINE_S))
            await self._finish(deadline_s)
            self._end_duties.set()
        flush_s = max(FLUSH_DEADLINE_S, deadline_s - time.monotonic())
        await self._best_effort(self._flush(), flush_s)
        # What the deadline cut short is still ours: let others have it now.
        await self._best_effort(self._hand_back(held), FLUSH_DEADLINE_S)
        if self.connection.is_connected and not self._is_silent:
            await self._leave()

    async def _leave(self) -> None:
        """Leave the group, unless entries that we handed back still have our name. If it fails, the
        leader deletes the consumer later."""
        config, queue = self.config, self.keys.queue
        try:
            async with asyncio.timeout(self._limit_s(LEAVE_S)):
                await self.connection.submit(leave(self.keys, config.group, config.consumer_id))
        except (ChasquiError, TimeoutError) as error:
            if "NOGROUP" not in str(error):
                fields = {"queue": queue}
                text = "queue %s: its group still lists this worker: %r"
                logger.info(text, queue, error, extra=fields)

    async def _finish(self, deadline_s: float) -> None:
        """Let handlers come to their end, until the deadline or until the drain is cut short."""
        left_s = deadline_s - time.monotonic()
        finishing = asyncio.ensure_future(self._dispatcher.stop(left_s))
        cut_short = asyncio.ensure_future(self._is_cut_short.wait())
        try:
            await asyncio.wait([finishing, cut_short], return_when=asyncio.FIRST_COMPLETED)
            if finishing.done():
                finishing.result()
                return
        finally:
            finishing.cancel()
            cut_short.cancel()
        await asyncio.gather(finishing, return_exceptions=True)
        await self._dispatcher.stop(0)

    async def _hand_back(self, held: list[bytes]) -> None:
        """Let others have what is not in our hands any more, and what is left of `held`."""
        kept, wake = self.holdings.busy_ids(), self._reader.has_claim
        hand_back = functools.partial(release, self.connection, self.keys, self.config)
        released = await hand_back(freed=held, kept=kept, wake=wake)
        if released and wake:
            # Behind a proxy our own read may not be over yet. It is woken like others, and takes
            # back what is ours; but only once.
            await hand_back(freed=[], kept=kept, wake=wake)
        not_begun = released - len(self._dispatcher.cut_short.keys() - set(kept))
        if not_begun > 0:
            queue = self.keys.queue
            logger.info(
                "queue %s: %s that had not begun %s back to it",
                queue,
                count(not_begun, "job"),
                "goes" if not_begun == 1 else "go",
                extra={"queue": queue, "entries": not_begun},
            )

    async def _flush(self) -> None:
        await self._acker.drain()
        await self._relocator.drain()
        if self.events is not None:
            self.events.run_once()

    async def _best_effort(self, work: Any, limit_s: float) -> None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._limit_s(limit_s)) as self._waiting:
                await work
        except Exception as error:
            self._is_silent = isinstance(error, TimeoutError)
            self._tell_incomplete(error)
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began_s))
        finally:
            self._waiting = None

    def _limit_s(self, limit_s: float) -> float:
        limit_s = max(0.0, min(limit_s, self._ends_s - time.monotonic()))
        is_there = self.connection.is_connected and not self._is_silent
        return limit_s if is_there else min(limit_s, self._patience_s)

    def _tell_incomplete(self, error: Exception) -> None:
        if self._is_incomplete:
            return  # what follows fails for the same reason, mostly
        self._is_incomplete = True
        queue = self.keys.queue
        logger.warning(
            "queue %s: the drain is incomplete: %s; jobs that could not be handed back run when "
            "their leases are over",
            queue,
            "the server did not answer" if isinstance(error, TimeoutError) else error,
            extra={"queue": queue},
        )

    def _tell_given_up(self) -> None:
        acks, moves = self._acker.waiting, self._relocator.waiting
        parts = (
            (acks, "finished job", "acknowledged"),
            (moves, "failed job", "put aside for a retry or into the dead-letter queue"),
        )
        queue = self.keys.queue
        for number, what, done in parts:
            if number:
                logger.warning(
                    "queue %s: %s could not be %s in time, and may run again",
                    queue,
                    count(number, what),
                    done,
                    extra={"queue": queue, "jobs": number},
                )

    # ── Watching over it ────────────────────────────────────────────────────────────────────────

    def health(self) -> Health:
        return Health(
            is_connected=self._reading.is_connected and self.connection.is_connected,
            last_read_age_s=time.monotonic() - self._reader.last_read_s,
            running=self.holdings.running,
            prefetched=len(self.holdings.waiting),
            oldest_running_s=self.holdings.oldest_running_s(),
            acks_waiting=self._acker.waiting,
            moves_waiting=self._relocator.waiting,
            lost=self._lost_count,
            finished=self._dispatcher.finished,
            cut_short=len(self._dispatcher.cut_short),
            is_incomplete=self._is_incomplete,
        )

    def _drained(self) -> None:
        if self.events is not None:
            self.events.drained()

    def _lost_in_thread(self, entry_ids: list[bytes]) -> None:
        """The heartbeat found entries that are not ours; some may be done by now."""
        lost = self.holdings.take_away(entry_ids)
        if lost and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._lost, lost)

    def _look_again(self) -> None:
        self._reader.look_again()

    def _lost(self, entry_ids: list[bytes]) -> None:
        self._lost_count += len(entry_ids)
        self._reader.look_again()
        logger.warning(
            "queue %s: %d entries were taken over by another worker, or went with their group, "
            "while they were in hand: %s",
            self.keys.queue,
            len(entry_ids),
            ", ".join(entry_id.decode() for entry_id in entry_ids[:5]),
            extra={"queue": self.keys.queue, "entries": len(entry_ids)},
        )


async def _undisturbed(work: Coroutine[Any, Any, None]) -> None:
    """Wait for the end of some work; cancelled meanwhile, however often, only after that."""
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
