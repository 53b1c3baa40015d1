"""The reader: takes entries from the group, as many as the dispatcher can use soon.

One blocking XREADGROUP at a time on a connection of its own. Where the server can, the same
command takes over what other consumers left behind; elsewhere a script does that beside it. What
would wait here for long goes back to the others.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from chasqui import clock, scripts
from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import xreadgroup
from chasqui._core.entry import Entry, EntryBuilder
from chasqui.transport.connection import Connection
from chasqui.consuming.appetite import Appetite
from chasqui.consuming.throttled_log import Complaints
from chasqui.consumer.config import MAX_READ, PREFETCH_BYTES, ConsumerConfig
from chasqui.consuming.fate import GONE, LEFT
from chasqui.consumer.holdings import Holdings
from chasqui.consumer.mercy import Mercy
from chasqui.consuming.standing import MOST, Standing
from chasqui.managing.consumers import join
from chasqui.errors import (
    ChasquiError,
    OutcomeUnknownError,
    ServerError,
    UnreachableError,
)
from chasqui.model.keys import Keys
from chasqui.transport.request import Effect, Request, commands

logger = logging.getLogger(__name__)

#: How often abandoned entries are looked for where the read itself cannot, while others have any in
#: hand. Where it can, it passes over entries that were deleted while pending: those are swept out
#: now and then.
RECLAIM_S: Final = 1.0
SWEEP_S: Final = 60.0
RECLAIM_BATCH: Final = 100
PAUSED_POLL_S: Final = 0.5
#: A blocking read is given up this long after the server should have answered.
READ_SLACK_S: Final = 5.0
ERROR_MIN_S, ERROR_MAX_S = 0.1, 1.0
#: With so many entries done and not yet gone from the stream, nothing more is read.
MAX_UNSETTLED: Final = 10_000
UNSETTLED_POLL_S: Final = 0.05


class Reader:
    """Reads entries and offers them to the dispatcher."""

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        config: ConsumerConfig,
        holdings: Holdings,
        *,
        offer: Callable[[list[Entry | None], bool], None],
        idle_slots: Callable[[], int],
        finished: Callable[[], int],
        unsettled: Callable[[], int],
        on_drained: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._config = config
        self._holdings = holdings
        self._offer = offer
        self._unsettled = unsettled
        self._on_drained = on_drained
        self._group = config.group.encode()
        self._consumer = config.consumer_id.encode()
        self._streams = EntryBuilder("streams", config.max_payload_bytes, PREFETCH_BYTES)
        self._range = EntryBuilder("range", config.max_payload_bytes, PREFETCH_BYTES)
        self._buffer = CommandBuffer()
        self._appetite = Appetite(config, holdings, idle_slots=idle_slots, finished=finished)
        self._room = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._has_group = False
        #: Whether a read takes over what others left behind; as the last one was asked.
        self.has_claim = False
        #: Entries may be ours and in nobody's hands: delivered in a reply that never came, or while
        #: an earlier copy was in hand; at first, to a process that had our name and died.
        self._must_recover = True
        #: Entries are ours of which only the ids were kept: others may have them.
        self._must_release = False
        self._is_first = True
        self._was_empty = True
        self._reclaim_at_s = 0.0
        self._mercy = Mercy(holdings.lease_s)
        self._standing = Standing(holdings.lease_s)
        self.complaints = Complaints(logger, keys.queue)
        #: When the last read came back, by the monotonic clock.
        self.last_read_s = time.monotonic()

    def wake(self) -> None:
        """There is room again."""
        self._room.set()

    def look_again(self) -> None:
        """Something was given up as lost, and may have been delivered to us again before that."""
        self._must_recover = True

    async def run(self) -> None:
        """Read until cancelled."""
        wait_s = ERROR_MIN_S
        while True:
            try:
                await self.run_once()
                wait_s = ERROR_MIN_S
                continue
            except (UnreachableError, OutcomeUnknownError) as error:
                self._must_recover = True
                fields = {"queue": self._keys.queue}
                logger.debug("reading %s again: %s", self._keys.queue, error, extra=fields)
                wait_s = ERROR_MIN_S  # dials are spaced out already
            except ServerError as error:
                if "NOGROUP" in str(error):  # a script has it in the middle of its text
                    self._has_group = False
                    if wait_s == ERROR_MIN_S:
                        wait_s *= 2
                        continue
                else:
                    self._must_recover = True  # not all that was asked need have been refused
                    self._complain(error)
            except ChasquiError as error:
                self._must_recover = True
                self._complain(error)
            except Exception as error:
                # Whatever it was, a worker that reads nothing is worse.
                self._must_recover = True
                self._complain(error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(wait_s * 2, ERROR_MAX_S)

    async def run_once(self) -> int:
        """One read, when there is room for it; how many entries came."""
        if not self._has_group:
            await self.join()
        if self._must_recover:
            await self._while_paused()
            await self._recover()
        room = await self._find_room()
        profile = self._connection.profile or await self._connection.connect()
        self.has_claim = profile.claim
        now_s = time.monotonic()
        mercy_ends_s = self._mercy.ends_s(self._connection.replaced_s, now_s)
        if now_s < mercy_ends_s:
            return await self._read(room, back_s=mercy_ends_s)
        count = 0
        if now_s >= self._reclaim_at_s:
            most = min(room, RECLAIM_BATCH)
            if profile.claim:
                standing = await self._left_standing()
                period_s = self._standing.looks_again_s or SWEEP_S
                count = await self._reclaim(most, min(period_s, SWEEP_S), standing)
            else:
                count = await self._look_after_others(most)
            if count == room:
                return count
        return count + await self._read(
            room - count, back_s=None if profile.claim else self._reclaim_at_s
        )

    async def _find_room(self) -> int:
        """How many entries to ask for, as soon as that is one at least."""
        while True:
            excess = self._appetite.excess()
            if excess or self._must_release:
                await self._hand_back(excess)
            is_full = self._unsettled() >= MAX_UNSETTLED
            room = 0 if is_full else self._appetite.wanted()
            if room > 0:
                return room
            self._room.clear()
            if is_full:
                await asyncio.sleep(UNSETTLED_POLL_S)
                continue
            if self._holdings.waiting and self._timer is None:
                delay_s = self._appetite.judged_in_s()
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)
            await self._room.wait()

    def _on_timer(self) -> None:
        self._timer = None
        self.wake()

    async def _hand_back(self, count: int) -> None:
        """Let others have the entries that came last of those that wait, and what is not in our
        hands. No read of ours is under way that could take them again."""
        holdings = self._holdings
        # Out of our hands first. If the server may not have heard of it, we recover them.
        freed = [holdings.waiting.pop().id for _ in range(count)]
        holdings.lost.difference_update(freed)
        await self._release(freed)
        self._must_release = False
        if not self.has_claim:
            self._reclaim_at_s = 0.0  # whoever has a slot first takes them: that may be us
        fields = {"queue": self._keys.queue, "entries": count}
        logger.debug("%d entries of queue %s wait for others", count, fields["queue"], extra=fields)

    async def _release(self, freed: list[bytes]) -> None:
        kept = self._holdings.ids()
        await release(
            self._connection, self._keys, self._config, freed=freed, kept=kept, wake=self.has_claim
        )

    async def _read(self, room: int, *, back_s: float | None) -> int:
        """Read, and be back at that time; without one, also take over what lapses meanwhile."""
        config = self._config
        block_ms = config.read_block_ms
        if back_s is not None:
            left_s = back_s - time.monotonic()
            block_ms = max(1, min(block_ms, int(left_s * 1000)))
        if self._holdings.waiting:
            block_ms = max(1, min(block_ms, int(self._appetite.judged_in_s() * 1000)))
        buffer = self._buffer
        xreadgroup(
            buffer,
            self._group,
            self._consumer,
            self._keys.stream,
            count=room,
            block_ms=block_ms,
            claim_min_idle_ms=config.claim_min_idle_ms if back_s is None else None,
        )
        # Asked right behind the read, which may have waited: a pause counts at once.
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
            # It waited for us too long. Only the server knows what is ours by now, and was not yet
            # when it came: of those, some may be in hand, or even done before we ask.
            self._must_recover = True
        elif not self._was_empty:
            self._was_empty = True
            self._on_drained()
        return 0

    def _accept(self, entries: list[Entry | None], is_paused: int, asked_s: float) -> int:
        """Hand out what a read brought as it comes in; how many, 0 if it needs a closer look."""
        self.last_read_s = time.monotonic()
        if not entries or is_paused or self._may_be_lost(asked_s):
            return 0
        return self._hand_out(entries)

    def _may_be_lost(self, asked_s: float) -> bool:
        """Whether a reply may have waited for us so long that its entries have another owner."""
        return clock.boot_s() - asked_s > self._holdings.lease_s * 2 / 3

    def _hand_out(self, entries: list[Entry | None]) -> int:
        self._was_empty = False
        if not self.has_claim:
            # Where there is work, entries are handed back: others' are looked for soon.
            self._reclaim_at_s = min(self._reclaim_at_s, self.last_read_s + RECLAIM_S)
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

    async def _look_after_others(self, most: int) -> int:
        """Take over what is left behind, where a read cannot; how many entries that was.

        While nothing is delivered but what we have in hand, a look in a third of a lease is
        enough: what is delivered meanwhile is then seen before it can lapse.
        """
        count, _, _, holders = await self._connection.execute(
            "XPENDING", self._keys.stream, self._group, effect=Effect.READ
        )
        is_all_ours = all(name == self._consumer for name, _ in holders or ())
        # What is being settled may or may not have been pending by then, and does not count.
        holdings = self._holdings
        in_hand = {*holdings.waiting_ids(), *holdings.running_ids()} - holdings.lost
        if not is_all_ours or count > len(in_hand):
            return await self._reclaim(most, RECLAIM_S, await self._left_standing())
        self._reclaim_at_s = time.monotonic() + max(self._holdings.lease_s / 3, RECLAIM_S)
        return 0

    async def _left_standing(self) -> list[bytes]:
        """Others' entries whose leases do not end because the server's clock was set back."""
        now_s = clock.boot_s()
        if not self._standing.is_due(now_s):
            return []
        rows = await self._connection.execute(
            "XPENDING", self._keys.stream, self._group, "-", "+", MOST, effect=Effect.READ
        )
        return self._standing.look((row for row in rows if row[1] != self._consumer), now_s)

    async def _reclaim(self, most: int, period_s: float, standing: Sequence[bytes] = ()) -> int:
        """Take over what other consumers left behind; how many entries that was."""
        config = self._config
        arguments: list[str | int | bytes] = [config.group, config.consumer_id]
        arguments.append(config.claim_min_idle_ms)
        entries = await self._connection.submit(
            scripts.call(
                scripts.RECLAIM,
                [self._keys.stream],
                [*arguments, most, *standing],
                Effect.ONCE,
                builder=self._range,
            )
        )
        if len(entries) < most:  # else there is more: the next one comes without delay
            self._reclaim_at_s = time.monotonic() + period_s
        if entries:
            self._take(entries, self._range)
        return len(entries)

    async def _recover(self) -> None:
        """Take up entries that are ours by the server's account and not in our hands."""
        config = self._config
        self._must_recover = False  # unless there is a reason to begin anew meanwhile
        while True:
            counts = "1" if self._is_first else ""
            arguments: list[bytes | str | int] = [config.group, config.consumer_id, counts]
            entries = await self._connection.submit(
                scripts.call(
                    scripts.RECOVER,
                    [self._keys.stream],
                    [*arguments, MAX_READ, *self._holdings.ids()],
                    Effect.IDEMPOTENT,
                    builder=self._range,
                )
            )
            is_last = len(entries) < MAX_READ or self._range.left > 0
            if entries:
                self._take([*await self._still_ours(entries)], self._range, is_fresh=False)
            if is_last:
                break
        self._is_first = False

    async def _still_ours(self, entries: list[Entry]) -> list[Entry]:
        """Those that nobody has taken over, their leases renewed; and those that are gone."""
        config = self._config
        ids = [entry.id for entry in entries]
        lost = set(
            await self._connection.submit(
                scripts.call(
                    scripts.RENEW,
                    [self._keys.stream],
                    [config.group, config.consumer_id, *ids],
                    Effect.IDEMPOTENT,
                )
            )
        )
        return [entry for entry in entries if entry.id not in lost or entry.fault == GONE]

    async def join(self) -> None:
        """Take part in the group; NotSupportedError if the queue has another one."""
        config, queue = self._config, self._keys.queue
        try:
            if await self._connection.run(join(self._keys, config.group, config.consumer_id)):
                fields = {"group": config.group, "queue": queue}
                logger.info("queue %s: group %s created", queue, config.group, extra=fields)
        except ServerError as error:
            if error.code != "OOM":
                raise
            self._complain(error)  # what is there already can be read all the same
        self._has_group = True

    async def _while_paused(self) -> None:
        """Wait for the end of a pause, if there is one."""
        was_paused = False
        while await self._connection.submit(
            commands(("EXISTS", self._keys.paused), effect=Effect.READ)
        ):
            if not was_paused:
                self._tell("queue %s is paused: its jobs wait")
            was_paused = True
            await asyncio.sleep(PAUSED_POLL_S)
            self.last_read_s = time.monotonic()
        if was_paused:
            self._tell("queue %s is no longer paused")
            self._reclaim_at_s = 0.0  # what was handed back is there to be taken

    def _tell(self, text: str) -> None:
        logger.info(text, self._keys.queue, extra={"queue": self._keys.queue})

    def _complain(self, error: Exception) -> None:
        self.complaints.warn(
            "queue %s cannot be read: %s",
            self._keys.queue,
            error,
            error=None if isinstance(error, ChasquiError) else error,
        )


class Delivery:
    """A read on its way. What it brings is handed out in the turn of the loop in which it comes."""

    __slots__ = ("_accept", "asked_s", "count", "future")

    def __init__(
        self, accept: Callable[[list[Entry | None], int, float], int], asked_s: float
    ) -> None:
        self._accept = accept
        self.asked_s = asked_s
        #: Entries that were handed out.
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
    keys: Keys,
    config: ConsumerConfig,
    *,
    freed: list[bytes],
    kept: list[bytes],
    wake: bool,
) -> int:
    """Hand back every entry that the server assigned to us, except those kept; how many.

    `freed` were in our hands: those among them whose consumer was deleted go back too. `wake` ends
    the reads of others that wait with CLAIM.
    """
    wakes = "1" if wake else ""
    arguments: list[str | bytes | int] = [config.group, config.consumer_id, wakes]
    arguments += (len(freed), *freed, *kept)
    try:
        count: int = await connection.submit(
            scripts.call(scripts.RELEASE, [keys.stream], arguments, Effect.IDEMPOTENT)
        )
    except ServerError as error:
        if "NOGROUP" not in str(error):
            raise
        return 0  # nothing is anybody's any more
    return count
