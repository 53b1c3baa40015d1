"""One fault: where it strikes, how long it lasts, what it may cause, and the list of all kinds."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import redis

from chasqui.model.keys import DEFAULT_GROUP
from tests.chaos.stage import Member, Stage

#: While a worker is out of reach for this share of its lease, others cannot take its jobs: it
#: renews at a third, so two thirds are left, and half of that for machines that are busy.
_HARMLESS_SHARE = 1 / 3


#: What is noted of a worker that ended by itself.
DEATH = "worker ended by itself"


@dataclass
class Record:
    """What happened, for the judge and the table."""

    kind: str
    at_s: float = 0.0
    #: When all was put back in order.
    over_s: float = 0.0
    target: str = ""
    #: Runs beyond the planned ones that it may cause: what was pending on whom it struck.
    may_repeat: int = 0
    #: Whose jobs those are.
    struck: set[str] = field(default_factory=set)
    #: Whose next finished job shows that work goes on; empty: anybody's.
    awaits: tuple[str, ...] = ()
    #: Workers that were lost, whose jobs others must begin.
    lost: tuple[str, ...] = ()
    #: It found nothing to strike.
    was_skipped: bool = False
    error: str = ""


@dataclass
class Scene:
    """What a fault may use."""

    stage: Stage
    record: Record
    random: random.Random
    #: Set when the run is over: faults that last should end.
    stop: threading.Event = field(default_factory=threading.Event)

    def last(self, low_s: float, high_s: float) -> float:
        """Let the fault last for a random while; how long."""
        while_s = self.random.uniform(low_s, high_s)
        self.stop.wait(while_s)
        return while_s

    @property
    def lease_s(self) -> float:
        """The lease that faults are measured by: the same for all queues."""
        return self.stage.fault_s

    @contextlib.contextmanager
    def member(self, *members: Member) -> Iterator[Member]:
        """One of these, in nobody else's hands, and running."""
        while True:
            order = self.random.sample(members, len(members))
            for member in order:
                if member.lock.acquire(blocking=False):
                    try:
                        if member.is_running:
                            self.record.target = member.who
                            yield member
                            return
                    finally:
                        member.lock.release()
            # A worker that is gone is about to be started again, and so is a producer that a fault
            # has in its hands; others have finished.
            is_coming = any(
                one.is_running or one.role == "worker" or one.lock.locked() for one in members
            )
            if self.stop.wait(0.05) or not is_coming:
                raise Skipped

    @contextlib.contextmanager
    def server(self) -> Iterator[None]:
        """The server, in nobody else's hands."""
        with self.stage.server_lock:
            self.record.target = "server"
            self.record.at_s = time.monotonic()  # not while another one had it
            yield

    @contextlib.contextmanager
    def outage(self, *struck: Member) -> Iterator[None]:
        """While it lasts, these workers may be unable to renew their leases."""
        pending, names = self.stage.pending(*struck), [member.who for member in struck]
        start_s = time.monotonic()
        yield
        if time.monotonic() - start_s > self.stage.lease_s * _HARMLESS_SHARE:
            self.record.may_repeat += pending
            self.record.struck.update(names)

    def may_repeat(self, *struck: Member) -> None:
        """What these workers have in hand may run once more."""
        self.record.may_repeat += self.stage.pending(*struck)
        self.record.struck.update(member.who for member in struck)

    def destroy_group(self) -> None:
        """Destroy the group, and count what was pending in it at that moment."""

        def destroy(client: redis.Redis) -> list[object]:
            with client.pipeline(transaction=True) as pipe:
                pipe.xpending(self.stage.keys.stream, DEFAULT_GROUP)
                pipe.xgroup_destroy(self.stage.keys.stream, DEFAULT_GROUP)
                return pipe.execute(raise_on_error=False)

        pending, _ = self.stage.ask(destroy)
        if isinstance(pending, dict):
            self.record.may_repeat += pending["pending"]
            self.record.struck.update(member.who for member in self.stage.workers)


class Skipped(Exception):
    """There is nothing to strike."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    strike: Callable[[Scene], None]
    #: Whether it makes sense with any queue, not only with chasqui.
    is_general: bool


KINDS: dict[str, Kind] = {}


def fault(
    name: str, *, general: bool = False
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Add a kind of fault to the list."""

    def add(strike: Callable[[Scene], None]) -> Callable[[Scene], None]:
        KINDS[name] = Kind(name, strike, general)
        return strike

    return add
