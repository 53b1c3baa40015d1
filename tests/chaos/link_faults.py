"""Faults of links: cut, stalled, slow, broken in the middle of a command or a reply."""

import contextlib
import time
from collections.abc import Iterator

from tests.chaos.scene import Scene, Skipped, fault
from tests.chaos.stage import Member
from tests.proxy import Fault

#: What workers and producers of ours send.
OUR_COMMANDS = ("EVALSHA", "XREADGROUP", "XACKDEL")
#: A fault that waits for a command or byte is given up after this.
WAIT_S = 3.0


@fault("link cut", general=True)
def cut(scene: Scene) -> None:
    with scene.member(*scene.stage.members) as member:
        _await(scene, member)
        member.link.cut()


@fault("all links cut", general=True)
def cut_all(scene: Scene) -> None:
    for member in scene.stage.members:
        member.link.cut()
    scene.record.target = "all links"


@fault("link cut again and again", general=True)
def flap(scene: Scene) -> None:
    with _one(scene) as member:
        for _ in range(scene.random.randint(5, 15)):
            member.link.cut()
            scene.last(0.02, 0.3)


@fault("replies lost", general=True)
def swallow(scene: Scene) -> None:
    with _one(scene) as member:
        member.link.is_swallowing = True
        scene.last(0.2, scene.lease_s * 1.2)
        # What comes after a gap would be out of step, as no TCP link ever is: they all must go.
        member.link.is_refusing = True
        for _ in range(2):  # one may just be on its way in
            member.link.cut()
            time.sleep(0.05)
        member.link.is_swallowing = member.link.is_refusing = False


@fault("link stalled", general=True)
def stall(scene: Scene) -> None:
    with _one(scene) as member:
        member.link.stall()
        scene.last(0.2, scene.lease_s * 1.2)
        member.link.resume()


@fault("latency and jitter", general=True)
def latency(scene: Scene) -> None:
    with _one(scene) as member:
        member.link.delay_s = scene.random.uniform(0.005, 0.05)
        member.link.jitter_s = scene.random.uniform(0.01, 0.1)
        scene.last(1.0, 3.0)
        member.link.delay_s = member.link.jitter_s = 0.0


@fault("links refused", general=True)
def refuse(scene: Scene) -> None:
    with _one(scene) as member:
        member.link.is_refusing = True
        member.link.cut()
        scene.last(0.3, 2.0)
        member.link.is_refusing = False


@fault("request cut at a byte", general=True)
def cut_request(scene: Scene) -> None:
    _cut_at_byte(scene, to_server=True)


@fault("reply cut at a byte", general=True)
def cut_reply(scene: Scene) -> None:
    _cut_at_byte(scene, to_server=False)


@fault("reply of one command lost")
def lose_reply(scene: Scene) -> None:
    _meet(scene, Fault.CUT_AFTER)


@fault("command lost")
def lose_command(scene: Scene) -> None:
    _meet(scene, Fault.CUT_BEFORE)


@fault("garbage instead of a reply")
def garbage(scene: Scene) -> None:
    _meet(scene, Fault.GARBAGE)


@contextlib.contextmanager
def _one(scene: Scene) -> Iterator[Member]:
    """Somebody's link, out of order for a while."""
    with scene.member(*scene.stage.members) as member, scene.outage(member):
        _await(scene, member)
        yield member


def _await(scene: Scene, member: Member) -> None:
    if member.role == "worker":
        scene.record.awaits = (member.who,)


def _cut_at_byte(scene: Scene, *, to_server: bool) -> None:
    with _one(scene) as member:
        links = member.link.accepted
        member.link.cut_after_bytes(scene.random.randint(1, 5000), to_server=to_server)
        _until_cut(scene, member, links)


def _meet(scene: Scene, kind: Fault) -> None:
    with _one(scene) as member:
        links = member.link.accepted
        seen = [command for command in OUR_COMMANDS if member.link.count(command)]
        member.link.fail(kind, scene.random.choice(seen or OUR_COMMANDS), nth=1)
        _until_cut(scene, member, links)


def _until_cut(scene: Scene, member: Member, links: int) -> None:
    """Return when the member has dialled again; if there is no traffic to cut, give up."""
    deadline_s = time.monotonic() + WAIT_S
    while member.link.accepted == links:
        if scene.stop.wait(0.01) or time.monotonic() > deadline_s:
            if member.link.disarm():
                raise Skipped
            return
