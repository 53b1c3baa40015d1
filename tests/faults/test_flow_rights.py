"""Users that lack a right: a step of a flow is then where it was, and nothing of its flow moved."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py

from chasqui import sync
from chasqui.cli.rights import needed
from chasqui.consuming.moves import Move, bury_steps
from chasqui.errors import ChasquiError
from chasqui.managing.entries import ranges
from chasqui.model.config import Endpoint
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.model.payload import encode
from chasqui.model.steps import step_of
from chasqui.producing.flows import FlowPlan, Step
from chasqui.scripts import flowing
from chasqui.scripts.flowing import Bounds, StepEnd
from chasqui.scripts.settling import Consumer
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.request import Request
from tests.servers import RemoteServer, Server

BOUNDS = Bounds(60_000, 1 << 20, None)
SCRIPTS = (flowing.FLOW_STEP, flowing.FLOW_BURY)
#: What the scripts of steps do to keys, and what they may do without.
CALLS = ("exists", "expire", "hget", "hincrby", "hmget", "hset", "time", "xack", "xadd", "xdel")
CALLS += ("xpending",)
#: At the end of a chain, of all chains, and where the flow cannot go on.
PLANS = {
    "next step": FlowPlan([[Step("n", 1), Step("n")]]),
    "join": FlowPlan([[Step("n", 1)]], [Step("n"), Step("n")]),
}


@pytest.fixture
def limited(
    server: Server | RemoteServer, queue_name: str, request: pytest.FixtureRequest
) -> Iterator[str]:
    """The URL of a user who lacks the right in question."""
    with redis_py.Redis.from_url(server.url) as client:
        right = request.getfixturevalue("right")
        client.execute_command(
            "ACL", "SETUSER", queue_name, "on", ">pw", "~*", "+@all", f"-{right}"
        )
        yield server.url.replace("redis://", f"redis://{queue_name}:pw@")
        client.execute_command("ACL", "DELUSER", queue_name)


class HeldStep:
    """A step in a consumer's hands."""

    def __init__(self, client: redis_py.Redis, url: str, keys: Keys, plan: FlowPlan) -> None:
        self.keys, self._client, self._url = keys, client, url
        with sync.Queue(keys.queue, redis_url=url) as queue:
            queue.add_flow(plan, flow_id="f")
        client.xgroup_create(keys.stream, DEFAULT_GROUP, "0")
        client.xreadgroup(DEFAULT_GROUP, "me", {keys.stream: ">"})
        (self._entry,) = send(url, ranges(("XRANGE", keys.stream, "-", "+")))
        self._consumer = Consumer(keys, DEFAULT_GROUP, "me")

    def done(self) -> Request:
        entry, place = self._entry, step_of(self._entry.job_id)
        assert place is not None
        end = StepEnd(entry.id, entry.job_id, place, encode(5), False, (1, "n", 1, 5, 1))
        return flowing.step(self._consumer, [end], BOUNDS, events=False, history=False)

    def dead(self) -> Request:
        move = Move(self._entry, 1, attempt=1, reason="unrecoverable")
        return bury_steps(self._consumer, [move], BOUNDS, events=False, history=False)

    def look(self) -> Any:
        client, keys = self._client, self.keys
        return (
            client.xrange(keys.stream),
            client.xpending(keys.stream, DEFAULT_GROUP)["pending"],
            client.xrange(keys.dlq),
            client.hgetall(keys.flow("f")),
        )


def send(url: str, request: Request) -> Any:
    def plan() -> Any:
        return (yield request)

    connection = BlockingConnection(Endpoint.parse(url), key=b"{chasqui:x}")
    try:
        return connection.run(plan())
    finally:
        connection.close()


@pytest.mark.parametrize("right", CALLS)
@pytest.mark.parametrize("end", ["done", "dead"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_moves_with_its_flow_or_not_at_all(
    plan: str, end: str, right: str, limited: str, server: Server, queue_name: str
) -> None:
    with redis_py.Redis.from_url(server.url) as client:
        step = HeldStep(client, server.url, Keys(queue_name), PLANS[plan])
        before = step.look()
        try:
            reply = send(limited, getattr(step, end)())
        except ChasquiError:
            assert step.look() == before
            reply = send(server.url, getattr(step, end)())
        after = step.look()
    assert reply in (b"1", b"4")
    entries, pending, dead, said = after
    assert pending == 0
    assert len(entries) == (1 if end == "done" else 0)
    assert len(dead) == (2 if end == "dead" else 0)
    assert said[b"e0.0"] == (b"1" if end == "done" else b"x")


def test_no_other_commands_are_in_these_scripts() -> None:
    """So that the test above leaves none out."""
    used = {
        call
        for call in needed("worker")
        if any(f"'{call.upper()}'".encode() in script.source for script in SCRIPTS)
    }
    assert used - set(CALLS) == {"set", "xlen", "xrange"}
