"""The reader: takes entries from the group, as many as the dispatcher can use soon.

It sends one blocking XREADGROUP at a time, on a connection of its own. Where the server can, the
same command takes over what other workers left behind; elsewhere `Takeovers` does that beside it.
Entries that would wait here for long go back to the others.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any, Final

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import xreadgroup
from chasqui._core.entry import Entry, EntryBuilder
from chasqui.consuming.appetite import Appetite
from chasqui.consuming.config import PREFETCH_BYTES, ConsumerConfig
from chasqui.consuming.fate import LEFT
from chasqui.consuming.held import Held
from chasqui.consuming.takeovers import Takeovers
from chasqui.consuming.throttled_log import ThrottledLog
from chasqui.errors import ChasquiError, OutcomeUnknownError, ServerError, UnreachableError
from chasqui.events.writer import EventWriter
from chasqui.managing.consumers import join
from chasqui.model import clock
from chasqui.scripts import settling
from chasqui.scripts.settling import Consumer
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, Request, commands
from chasqui.transport.server import is_group_gone

logger = logging.getLogger(__name__)

PAUSED_POLL_S: Final = 0.5
#: A blocking read is given up this long after the server should have answered.
READ_SLACK_S: Final = 5.0
ERROR_MIN_S, ERROR_MAX_S = 0.1, 1.0
#: Nothing more is read while so many entries are done and not yet gone from the stream.
MAX_UNSETTLED: Final = 10_000
UNSETTLED_POLL_S: Final = 0.05


class Reader:
    """Reads entries and offers them to the dispatcher."""

    #: Whether a read waits for entries.
    _blocks = True

    def __init__(
        self,
        connection: Connection,
        consumer: Consumer,
        config: ConsumerConfig,
        held: Held,
        *,
        offer: Callable[[list[Entry | None], bool], None],
        events: EventWriter | None,
    ) -> None:
        self._connection = connection
        self._keys = keys = consumer.keys
        self._config = config
        self._held = held
        self._offer = offer
        self._events = events
        self._consumer = consumer
        self._group_name, self._consumer_name = consumer.group.encode(), consumer.name.encode()
        self._streams = EntryBuilder("streams", config.max_payload_bytes, PREFETCH_BYTES)
        self._buffer = CommandBuffer()
        self._appetite = Appetite(config, held)
        self._takeovers = Takeovers(connection, consumer, config, held)
        self._timer: asyncio.TimerHandle | None = None
        self._has_group = False
        #: Whether the last read could take over what others left behind.
        self.has_claim = False
        #: Some entries were too much for one read: they are ours, but we kept only their ids.
        self._must_release = False
        self._is_first = True
        self._was_empty = True
        self.log = ThrottledLog(logger, keys.queue)
        #: When the last read came back, by the monotonic clock.
        self.last_read_s = time.monotonic()

    async def run(self) -> None:
        """Read until cancelled."""
        wait_s = ERROR_MIN_S
        while True:
            try:
                await self.run_once()
                wait_s = ERROR_MIN_S
                continue
            except (UnreachableError, OutcomeUnknownError) as error:
                self._held.must_recover = True
                fields = {"queue": self._keys.queue}
                logger.debug("reading %s again: %s", self._keys.queue, error, extra=fields)
                wait_s = ERROR_MIN_S  # dials are spaced out already
            except Exception as error:  # of any kind: a worker that stops reading is worse
                if isinstance(error, ServerError) and is_group_gone(error):
                    self._has_group = False
                    if wait_s == ERROR_MIN_S:
                        wait_s *= 2
                        continue
                else:
                    self._held.must_recover = True  # the server may have done a part of it
                    self._log_failure(error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(wait_s * 2, ERROR_MAX_S)

    async def run_once(self) -> int:
        """Read once, as soon as there is room; how many entries came."""
        if not self._has_group:
            await self.join()
        if self._held.must_recover:
            await self._while_paused()
            await self._recover()
        room = await self._find_room()
        profile = self._connection.profile or await self._connection.connect()
        self.has_claim = profile.claim
        now_s = time.monotonic()
        takeovers = self._takeovers
        paused_until_s = takeovers.pause.until_s(self._connection.replaced_s, now_s)
        if now_s < paused_until_s:
            return await self._read(room, back_s=paused_until_s)
        count = 0
        if now_s >= takeovers.look_at_s:
            entries = await takeovers.look(room, has_claim=profile.claim)
            if entries:
                self._take(entries, takeovers.builder)
            count = len(entries)
            if count == room:
                return count
        back_s = None if profile.claim else takeovers.look_at_s
        return count + await self._read(room - count, back_s=back_s)

    async def _recover(self) -> None:
        """Take up our entries that nothing here is processing."""
        self._held.must_recover = False  # unless a reason comes up meanwhile
        is_last = False
        while not is_last:
            entries, is_last = await self._takeovers.recover(counts=self._is_first)
            if entries:
                self._take(entries, self._takeovers.builder, is_fresh=False)
        self._is_first = False

    async def _find_room(self) -> int:
        """How many entries to ask for, as soon as that is at least one."""
        while True:
            excess = self._appetite.excess()
            if excess or self._must_release:
                await self._give_back(excess)
            is_full = self._held.unsettled >= MAX_UNSETTLED
            room = self._wanted(is_full)
            if room > 0:
                return room
            self._held.room.clear()
            if is_full:
                await asyncio.sleep(UNSETTLED_POLL_S)
                continue
            if self._held.waiting and self._timer is None:
                delay_s = self._appetite.judged_in_s()
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)
            await self._held.room.wait()

    def _wanted(self, is_full: bool) -> int:
        return 0 if is_full else self._appetite.wanted()

    def _on_timer(self) -> None:
        self._timer = None
        self._held.room.set()

    async def _give_back(self, count: int) -> None:
        """Give back the last `count` entries that wait, and all that we do not hold. No read of
        ours is under way that could take them again."""
        held = self._held
        # First out of our hands: if the server may not have heard of it, we recover them.
        freed = [held.waiting.pop().id for _ in range(count)]
        held.lost.difference_update(freed)
        await self._release(freed)
        self._must_release = False
        if not self.has_claim:
            self._takeovers.look_at_s = 0.0  # the first free slot takes them, and may be ours
        fields = {"queue": self._keys.queue, "entries": count}
        logger.debug("%d entries of queue %s wait for others", count, fields["queue"], extra=fields)

    async def _release(self, freed: list[bytes]) -> None:
        kept = self._held.ids()
        await release(self._connection, self._consumer, freed=freed, kept=kept, wake=self.has_claim)

    async def _read(self, room: int, *, back_s: float | None) -> int:
        """Read, and be back at `back_s`; if that is None, also take over what lapses meanwhile."""
        config = self._config
        block_ms = config.read_block_ms
        if back_s is not None:
            left_s = back_s - time.monotonic()
            block_ms = max(1, min(block_ms, int(left_s * 1000)))
        if self._held.waiting:
            block_ms = max(1, min(block_ms, int(self._appetite.judged_in_s() * 1000)))
        buffer = self._buffer
        xreadgroup(
            buffer,
            self._group_name,
            self._consumer_name,
            self._keys.stream,
            count=room,
            block_ms=block_ms if self._blocks else None,
            claim_min_idle_ms=config.claim_min_idle_ms if back_s is None else None,
        )
        # Right behind the read, which may have waited: so a pause takes effect at once.
        buffer.command(b"EXISTS", self._keys.paused)
        request = Request(
            bytes(buffer),
            Effect.ONCE,
            count=2,
            builder=self._streams,
            timeout_s=block_ms / 1000 + READ_SLACK_S,
        )
        buffer.clear()
        delivery = Delivery(self._accept, clock.boot_s())
        self._connection.post(request, delivery)
        entries, is_paused = await delivery.future
        if delivery.count:
            return delivery.count
        if is_paused:
            if entries:
                await self._release([])
            await self._while_paused()
            return 0
        if entries:
            # The reply waited for us too long: only the server knows what is ours by now. Some of
            # these entries may be in hand from an earlier delivery, or be done before we ask.
            self._held.must_recover = True
        elif not self._was_empty:
            self._was_empty = True
            if self._events is not None:
                self._events.drained()
        return 0

    def _accept(self, entries: list[Entry | None], is_paused: int, asked_s: float) -> int:
        """Hand out what a read brought, as soon as it comes in; how many entries that were. 0 if
        the reply needs a closer look."""
        self.last_read_s = time.monotonic()
        if not entries or is_paused:
            return 0
        if clock.boot_s() - asked_s > self._held.lease_s * 2 / 3:
            return 0  # the reply waited for us so long that its entries may have another owner
        self._was_empty = False
        if not self.has_claim:
            self._takeovers.look_soon()
        self._take(entries, self._streams)
        return len(entries)

    def _take(
        self, entries: list[Entry | None], builder: EntryBuilder, *, is_fresh: bool = True
    ) -> None:
        if builder.left:
            entries = [entry for entry in entries if entry is None or entry.fault != LEFT]
            self._must_release = True
        self._appetite.came(builder.largest)
        self._offer(entries, is_fresh)

    async def join(self) -> None:
        """Join the group; NotSupportedError if the queue has another one."""
        queue, group = self._keys.queue, self._consumer.group
        try:
            if await self._connection.run(join(self._consumer)):
                fields = {"group": group, "queue": queue}
                logger.info("queue %s: group %s created", queue, group, extra=fields)
        except ServerError as error:
            if error.code != "OOM":
                raise
            self._log_failure(error)  # entries that are there already can still be read
        self._has_group = True

    async def _while_paused(self) -> None:
        """Wait until the queue is not paused."""
        was_paused = False
        while await self._connection.submit(
            commands(("EXISTS", self._keys.paused), effect=Effect.READ)
        ):
            if not was_paused:
                self._log_info("queue %s is paused: its jobs wait")
            was_paused = True
            await asyncio.sleep(PAUSED_POLL_S)
            self.last_read_s = time.monotonic()
        if was_paused:
            self._log_info("queue %s is no longer paused")
            self._takeovers.look_at_s = 0.0  # entries that were given back are there to be taken

    def _log_info(self, text: str) -> None:
        logger.info(text, self._keys.queue, extra={"queue": self._keys.queue})

    def _log_failure(self, error: Exception) -> None:
        self.log.warning(
            "queue %s cannot be read: %s",
            self._keys.queue,
            error,
            error=None if isinstance(error, ChasquiError) else error,
        )


class Delivery:
    """A read on its way. Its entries are handed out in the turn of the loop in which they come."""

    __slots__ = ("_accept", "asked_s", "count", "future")

    def __init__(
        self, accept: Callable[[list[Entry | None], int, float], int], asked_s: float
    ) -> None:
        self._accept = accept
        self.asked_s = asked_s
        #: How many entries were handed out.
        self.count = 0
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(self) -> bool:
        return self.future.done()

    def set_result(self, reply: Any, /) -> None:
        entries, is_paused = reply
        try:
            self.count = self._accept(entries, is_paused, self.asked_s)
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(reply)

    def set_exception(self, error: Exception, /) -> None:
        self.future.set_exception(error)


async def release(
    connection: Connection,
    consumer: Consumer,
    *,
    freed: list[bytes],
    kept: list[bytes],
    wake: bool,
) -> int:
    """Give back what the server assigned to us, as `settling.release` does; how many entries."""
    try:
        count: int = await connection.submit(settling.release(consumer, freed, kept, wake=wake))
    except ServerError as error:
        if not is_group_gone(error):
            raise
        return 0  # with the group, nobody holds anything any more
    return count
