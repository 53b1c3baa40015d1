"""Where scenes play: one server, a tap before it, and what scenes wait for."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

import chasqui
from tests.frames.normal import Normal
from tests.frames.recording import Recording, scene_lines
from tests.frames.scripts import Scripts
from tests.frames.tap import WAIT_S, Tap
from tests.servers import Server

#: Settings of the server: `durable="disk"` asks for a log that is on the disk at once.
SETTINGS = {"appendonly": "yes", "appendfsync": "always"}


@dataclass(frozen=True)
class Scene:
    """Something that clients do. A scene of the blocking queue is `sync` and what it is there."""

    name: str
    play: Callable[["Stage"], Awaitable[None]]
    #: Whether only distinct commands are compared, by kind.
    is_loose: bool = False

    @property
    def queue(self) -> str:
        return self.name.removeprefix("sync ").replace(" ", "-")


class Stage:
    """What a scene finds. What goes to `url` is recorded, what goes to `direct_url` is not."""

    def __init__(self, queue: str, tap: Tap, server: Server, scripts: Scripts) -> None:
        self.queue = queue
        self.url = tap.url
        self.direct_url = server.url
        self.redis = redis.Redis(port=server.port)
        self._tap = tap
        self._scripts = scripts

    @asynccontextmanager
    async def unseen(self) -> Any:
        """A queue whose commands are not recorded, to prepare a scene."""
        async with chasqui.Queue(self.queue, redis_url=self.direct_url) as queue:
            yield queue

    def key(self, name: str) -> str:
        """A key of the scene's queue, as docs/wire.md names them."""
        return f"{{chasqui:{self.queue}}}:{name}"

    def tap_count(self, wanted: bytes) -> int:
        """How often clients have sent these bytes."""
        return self._tap.count(wanted)

    async def until(self, fact: Callable[[], object]) -> None:
        """Return when something has become true."""
        deadline_s = time.monotonic() + WAIT_S
        while not fact():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"a scene of {self.queue} waits in vain")
            await asyncio.sleep(0.004)

    async def until_settled(self) -> None:
        """Return when no job waits, runs or is delayed: all is acknowledged or dead."""
        look = self.redis.pipeline()  # at one moment: a job may go from the one to the other

        def is_empty() -> bool:
            return look.xlen(self.key("stream")).zcard(self.key("delayed")).execute() == [0, 0]

        await self.until(is_empty)

    async def until_sent(self, *names: str) -> None:
        """Return when these commands or scripts were sent."""

        def is_sent(name: str) -> bool:
            wanted = [sha.encode() for sha in self._scripts.shas(name)]
            wanted += [f"\r\n{name}\r\n".encode()]
            return any(self._tap.count(one) for one in wanted)

        for name in names:
            await self.until(lambda name=name: is_sent(name))


async def perform(kind: str, package: Path, t0_ms: int, names: list[str]) -> Recording:
    """Play all scenes, or those of these names, on a new server of a kind."""
    from tests.frames.scenes import SCENES

    scripts = Scripts(package)
    normal = Normal(scripts, t0_ms)
    recording = Recording()
    with Server(kind, **SETTINGS) as server:
        tap = Tap(server.port)
        for scene in SCENES:
            if names and scene.name not in names:
                continue
            stage = Stage(scene.queue, tap, server, scripts)
            stage.redis.flushall()
            _load(stage.redis, scripts)
            try:
                async with asyncio.timeout(WAIT_S):
                    await scene.play(stage)
            except Exception as error:
                error.add_note(f"in scene {scene.name!r} on {kind}")
                raise
            stage.redis.close()
            sent = [[normal.command(frame) for frame in frames] for frames in tap.take()]
            recording.scenes[scene.name, kind] = scene_lines(sent, is_loose=scene.is_loose)
        tap.close()
    recording.scripts = scripts.seen
    return recording


def _load(server: redis.Redis, scripts: Scripts) -> None:
    """Let the server know all scripts, so that no scene has to send them."""
    pipeline = server.pipeline(transaction=False)
    for _, source in scripts.sources.values():
        pipeline.script_load(source)
    pipeline.execute()
