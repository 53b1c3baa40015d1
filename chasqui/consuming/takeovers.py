"""Entries that a read does not bring: those that other workers left behind, and entries of our own
that nothing here is processing."""

import time
from collections.abc import Sequence
from typing import Any, Final

from chasqui._core.entry import Entry, EntryBuilder
from chasqui.consuming.config import MAX_READ, PREFETCH_BYTES, ConsumerConfig
from chasqui.consuming.fate import GONE
from chasqui.consuming.held import Held
from chasqui.consuming.standing import MOST, Standing
from chasqui.consuming.takeover_pause import TakeoverPause
from chasqui.model import clock
from chasqui.scripts import settling
from chasqui.scripts.settling import Consumer
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect

#: How often to look for abandoned entries where a read cannot take them over, while other workers
#: hold any.
LOOK_S: Final = 1.0
#: How often to look where it can: a read passes over entries that were deleted while pending.
SWEEP_S: Final = 60.0
#: The most entries that one look takes over.
MOST_TAKEN: Final = 100


class Takeovers:
    """Looks for abandoned entries and takes them over."""

    def __init__(
        self, connection: Connection, consumer: Consumer, config: ConsumerConfig, held: Held
    ) -> None:
        self._connection = connection
        self._consumer = consumer
        self._name = consumer.name.encode()
        self._idle_ms = config.claim_min_idle_ms
        self._held = held
        self._standing = Standing(held.lease_s)
        self.pause = TakeoverPause(held.lease_s)
        self.builder = EntryBuilder("range", config.max_payload_bytes, PREFETCH_BYTES)
        #: When to look again, by the monotonic clock.
        self.look_at_s = 0.0

    def look_soon(self) -> None:
        """Look within LOOK_S: there is work, and workers that are behind give entries back."""
        self.look_at_s = min(self.look_at_s, time.monotonic() + LOOK_S)

    async def look(self, most: int, *, has_claim: bool) -> list[Entry | None]:
        """Take over up to `most` entries. `has_claim`: reads take over what lapses, so this one is
        for what they pass over."""
        most = min(most, MOST_TAKEN)
        if not has_claim:
            return await self._look_after_others(most)
        standing = await self._left_standing()
        period_s = self._standing.looks_again_s or SWEEP_S
        return await self._take_over(most, min(period_s, SWEEP_S), standing)

    async def _look_after_others(self, most: int) -> list[Entry | None]:
        """The look where reads cannot take over.

        While we hold all that is pending, one look in a third of a lease is enough: it sees what is
        delivered to others meanwhile before that can lapse.
        """
        held = self._held
        count, _, _, holders = await self._pending()
        is_all_ours = all(name == self._name for name, _ in holders or ())
        # Entries that are being settled may or may not have been pending by then: leave them out.
        in_hand = {*held.waiting_ids(), *held.running_ids()} - held.lost
        if not is_all_ours or count > len(in_hand):
            return await self._take_over(most, LOOK_S, await self._left_standing())
        self.look_at_s = time.monotonic() + max(held.lease_s / 3, LOOK_S)
        return []

    async def _left_standing(self) -> list[bytes]:
        """Others' entries whose leases do not end because the server's clock was set back."""
        now_s = clock.boot_s()
        if not self._standing.is_due(now_s):
            return []
        rows = await self._pending("-", "+", MOST)
        return self._standing.look((row for row in rows if row[1] != self._name), now_s)

    async def _pending(self, *extent: str | int) -> Any:
        keys, group, _ = self._consumer
        return await self._connection.execute(
            "XPENDING", keys.stream, group, *extent, effect=Effect.READ
        )

    async def _take_over(
        self, most: int, period_s: float, standing: Sequence[bytes] = ()
    ) -> list[Entry | None]:
        request = settling.reclaim(self._consumer, self._idle_ms, most, standing, self.builder)
        entries: list[Entry | None] = await self._connection.submit(request)
        if len(entries) < most:  # else there is more: the next look comes without delay
            self.look_at_s = time.monotonic() + period_s
        return entries

    async def recover(self, *, counts: bool) -> tuple[list[Entry | None], bool]:
        """Entries that the server assigned to us and that nothing here is processing, their leases
        renewed; and whether these were the last. `counts` makes it one more delivery of each."""
        in_hand = self._held.ids()
        request = settling.recover(self._consumer, in_hand, MAX_READ, self.builder, counts=counts)
        entries: list[Entry] = await self._connection.submit(request)
        is_last = len(entries) < MAX_READ or self.builder.left > 0
        if not entries:
            return [], is_last
        # The script renews no lease, so that a worker whose replies are lost keeps nothing from
        # others. So some of these may have another owner by now.
        ids = [entry.id for entry in entries]
        lost = set(await self._connection.submit(settling.renew(self._consumer, ids)))
        return [one for one in entries if one.id not in lost or one.fault == GONE], is_last
