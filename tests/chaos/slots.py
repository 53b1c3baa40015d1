"""`python -m tests.chaos.slots`: repeat specs whose schedulers are killed, stopped, held up and cut
off, on a server whose clock jumps. At every rest each spec has fired as often as it had slots."""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis

from chasqui import MissedFiresPolicy, Queue, RepeatPattern
from chasqui.model.keys import ENVELOPE, Keys
from tests.chaos.figure import Figure, Say, silent
from tests.faults.clock import ClockServer, build_clock, clock_s
from tests.ledger import number
from tests.proxy import Fault, Proxy
from tests.timed.process import Process

QUEUE = "slots"
SCHEDULERS = 3
#: By the server's clock; half an hour later Europe puts its clocks forward.
BEGIN_S = int(datetime(2027, 3, 28, 0, 30, tzinfo=UTC).timestamp())
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "-03:00")
#: What is repeated, and every how many seconds that is, whatever the zone does.
CRONS = {"*/15 * * * * *": 15, "* * * * *": 60, "*/2 * * * *": 120, "*/5 * * * *": 300}
EVERY_S = (15, 30, 45, 60, 90, 120)
#: How many specs there are of each.
COPIES = 10
#: How far the clock jumps, in minutes, and one time in `RARE` much further.
JUMP_MIN, FAR_MIN, RARE = (1, 3), (60, 120), 50
#: Where in a minute it lands: long before the next slot.
LAND_S = 1
#: How long a worker's own clock may be off.
OFF_S = 86_400
#: Specs and slots of a bout at the clock's own pace, and the time between two slots.
LIVE_SPECS, LIVE_SLOTS, LIVE_MS = 10, 100, 50
#: So often there is one.
LIVE_EVERY = 10
REST_S = 60.0
_LOOK_S = 0.02
_READ = 5000


class WrongCountError(Exception):
    """Fires and slots are not the same."""


@dataclass
class Books:
    """What fired, taken out of the stream, and what had to."""

    client: redis.Redis
    stream: bytes
    #: Spec → when its slots begin and end, and the time between two; all in ms.
    specs: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    fires: Counter[int] = field(default_factory=Counter)
    #: The latest that the clock has shown.
    now_ms: int = 0

    def due(self) -> dict[int, int]:
        """How many slots each spec has had by now."""
        self.now_ms = max(self.now_ms, int(clock_s(self.client) * 1000))
        return {
            n: max(0, min(self.now_ms, end_ms) - begin_ms) // period_ms
            for n, (begin_ms, end_ms, period_ms) in self.specs.items()
        }

    def take(self) -> None:
        """Take what has fired out of the stream."""
        while found := self.client.xrange(self.stream, count=_READ):
            self.fires.update(number(fields[ENVELOPE]) for _, fields in found)
            self.client.xdel(self.stream, *(entry_id for entry_id, _ in found))

    def rest(self, what: str) -> None:
        """Return when fires equal slots. Raises WrongCountError for one that does not come, and for
        one too many."""
        deadline_s = time.monotonic() + REST_S
        while True:
            before = self.due()
            self.take()
            after = self.due()
            if before == after == {n: self.fires[n] for n in after}:
                return
            doubled = {n: (self.fires[n], m) for n, m in after.items() if self.fires[n] > m}
            if doubled or time.monotonic() > deadline_s:
                missed = {n: (self.fires[n], m) for n, m in before.items() if self.fires[n] < m}
                raise WrongCountError(f"{what}: fires and slots: {doubled or missed}")
            time.sleep(_LOOK_S)


Strike = Callable[["Scene"], AbstractContextManager[None]]


class Scene:
    """The server, and schedulers behind a link each."""

    def __init__(self, server: ClockServer, luck: random.Random) -> None:
        self.server = server
        self.luck = luck
        self.client = redis.Redis.from_url(server.url)
        self.keys = Keys(QUEUE)
        self._stack = ExitStack()
        self._links = [self._stack.enter_context(Proxy(server.url)) for _ in range(SCHEDULERS)]
        self._processes = [self._start(place) for place in range(SCHEDULERS)]

    def leading(self) -> int:
        """The place of the scheduler that leads; any, if none does just now."""
        holder = self.client.get(self.keys.scheduler_lock)
        names = [process.holder.encode() for process in self._processes]
        return names.index(holder) if holder in names else self.luck.randrange(SCHEDULERS)

    def jump(self, to_s: int) -> None:
        """Set the server's clock."""
        self.server.jump(to_s - int(time.time()))

    # ── Faults: each is there for a `with` block ──

    @contextmanager
    def calm(self) -> Iterator[None]:
        """None."""
        yield

    @contextmanager
    def killed(self) -> Iterator[None]:
        place = self.leading()
        self._processes[place].kill()
        yield
        self._processes[place] = self._start(place)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        leading = self._processes[self.leading()]
        leading.stop()
        try:
            yield
        finally:
            leading.resume()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Between what it found out and what it does about it."""
        link = self._links[self.leading()]
        link.fail(Fault.HOLD_BEFORE, "EVALSHA")
        yield
        link.resume()
        link.forget()

    @contextmanager
    def request_lost(self) -> Iterator[None]:
        link = self._links[self.leading()]
        link.fail(Fault.CUT_BEFORE, "EVALSHA", times=2)
        yield
        link.forget()

    @contextmanager
    def reply_lost(self) -> Iterator[None]:
        link = self._links[self.leading()]
        link.fail(Fault.CUT_AFTER, "EVALSHA", times=2)
        yield
        link.forget()

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """All of them, for a moment."""
        for link in self._links:
            link.is_refusing = True
            link.cut()
        yield
        for link in self._links:
            link.is_refusing = False

    @contextmanager
    def clock_put_back(self) -> Iterator[None]:
        now_s = int(clock_s(self.client))
        self.jump(now_s - 60 * self.luck.randint(1, 60))
        yield

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._stack.close()
        self.client.close()

    def _start(self, place: int) -> Process:
        """Start a scheduler, and return when it is at work: before, it does not wait for a server
        that is away."""
        link = self._links[place]
        looks = link.count("ZCARD")
        holder = f"{place}-{self.luck.getrandbits(32):x}"
        off_s = self.luck.randint(-OFF_S, OFF_S)
        process = Process("scheduler", link.url, QUEUE, holder, off_s)
        link.wait_for(lambda: link.count("ZCARD") > looks)
        return process


#: Faults that others can make up for while they last, and those that pass.
LASTING: tuple[Strike, ...] = (Scene.killed, Scene.stopped, Scene.held_up)
PASSING: tuple[Strike, ...] = (
    Scene.calm, Scene.request_lost, Scene.reply_lost, Scene.cut_off, Scene.clock_put_back,
)  # fmt: skip


def measure(kind: str, slots: int, seed: int, *, say: Say = silent) -> dict[str, Any]:
    """Let the clock jump until there were so many slots; count the fires at each rest."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ClockServer(kind, build_clock(Path(folder)), Path(folder, "clock")) as server,
    ):
        scene = Scene(server, random.Random(seed))
        books = Books(scene.client, scene.keys.stream)
        struck, wrong, began_s = Counter[str](), "", time.monotonic()
        try:
            scene.jump(BEGIN_S - 60)
            asyncio.run(_write(server.url, books, _patterns(), BEGIN_S * 1000))
            _play(scene, books, slots, struck, say)
        except WrongCountError as error:
            wrong = str(error)
        finally:
            due = books.due()
            scene.close()
    return {
        "server": kind, "seed": seed, "specs": len(due), "slots": sum(due.values()),
        "fires": sum(books.fires.values()), "faults": dict(struck), "wrong": wrong,
        "seconds": round(time.monotonic() - began_s),
    }  # fmt: skip


def _play(scene: Scene, books: Books, slots: int, struck: Counter[str], say: Say) -> None:
    luck, clock_min = scene.luck, BEGIN_S // 60
    while sum(books.fires.values()) < slots:
        struck["clock_put_forward"] += 1
        strike = luck.choice(LASTING + PASSING)
        struck[strike.__name__] += 1
        what = f"jump {struck['clock_put_forward']}, {strike.__name__}"
        clock_min += luck.randint(*(JUMP_MIN if luck.randrange(RARE) else FAR_MIN))
        with strike(scene):
            scene.jump(clock_min * 60 + LAND_S)
            if strike in LASTING:
                books.rest(what)
            else:
                time.sleep(luck.uniform(0, 0.5))
        books.rest(f"{what} over")
        if struck["clock_put_forward"] % LIVE_EVERY == 0:
            struck.update(_live(scene, books))
            clock_min += 1
        say(sum(books.fires.values()))


def _live(scene: Scene, books: Books) -> Counter[str]:
    """Let some specs fire at the clock's own pace, with faults meanwhile; how many of each kind."""
    begin_ms = int(clock_s(scene.client) * 1000) + 1000
    patterns = [(RepeatPattern.every(LIVE_MS), LIVE_MS)] * LIVE_SPECS
    end_ms = begin_ms + LIVE_SLOTS * LIVE_MS
    asyncio.run(_write(scene.server.url, books, patterns, begin_ms, end_ms))
    struck = Counter[str]()
    kinds = [strike for strike in LASTING + PASSING if strike is not Scene.clock_put_back]
    while clock_s(scene.client) * 1000 < end_ms:
        strike = scene.luck.choice(kinds)
        struck[strike.__name__] += 1
        with strike(scene):
            time.sleep(scene.luck.uniform(0.2, 1.0))
    books.rest(f"at its own pace, {dict(struck)}")
    return struck


async def _write(
    url: str,
    books: Books,
    patterns: list[tuple[RepeatPattern, int]],
    begin_ms: int,
    end_ms: int | None = None,
) -> None:
    """Write specs whose slots come at whole periods after a moment."""
    async with Queue(QUEUE, redis_url=url) as queue:
        for pattern, period_ms in patterns:
            n = len(books.specs)
            await queue.upsert_repeatable_job(
                "slot", {"n": n}, repeat=pattern, key=f"spec-{n}", start_after_ms=begin_ms,
                end_before_ms=end_ms, missed_fires=MissedFiresPolicy.fire_all(10_000),
            )  # fmt: skip
            books.specs[n] = (begin_ms, end_ms or sys.maxsize, period_ms)


def _patterns() -> list[tuple[RepeatPattern, int]]:
    """What is repeated, and every how many ms."""
    found = []
    for copy in range(COPIES):
        zone = ZONES[copy % len(ZONES)]
        found += [(RepeatPattern.cron(text, tz=zone), 1000 * s) for text, s in CRONS.items()]
        found += [(RepeatPattern.every(1000 * s), 1000 * s) for s in EVERY_S]
    return found


def wrong(told: dict[str, Any]) -> list[str]:
    """What must not be."""
    found = [told["wrong"]] if told["wrong"] else []
    if told["fires"] != told["slots"]:
        found.append(f"{told['fires']:,} fires of {told['slots']:,} slots")
    return found


def main() -> int:
    figure = Figure("slots", __doc__)
    figure.parser.add_argument("--slots", type=int, default=100_000)
    asked = figure.arguments()
    told = measure(asked.server, asked.slots, asked.seed, say=figure.say)
    return figure.end(asked.json, told, wrong(told))


if __name__ == "__main__":
    sys.exit(main())
