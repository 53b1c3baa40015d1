"""The programs that measure one thing each, in small: they count right."""

import asyncio
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import redis

from chasqui.model.keys import ENVELOPE
from tests.chaos import (
    cancels,
    durability,
    failovers,
    garbage,
    hostile,
    idle,
    leases,
    restarts,
    slots,
    soak,
)
from tests.faults.disk import build_shim
from tests.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_hostile_entries_are_buried_and_good_ones_done() -> None:
    told = asyncio.run(hostile.measure("valkey-9", 400, seed=1))
    assert hostile.wrong(told) == []
    assert told["good"] == told["broken"] == 400
    told |= {"done": 399, "runs": 401, "rss_mb": [40, 41 + hostile.GROWTH_MB]}
    assert len(hostile.wrong(told)) == 3


@pytest.mark.fault(8)
def test_a_power_cut_takes_nothing_that_was_synced(tmp_path: Path) -> None:
    shim, luck = build_shim(tmp_path), random.Random(1)
    cell = durability.measure("redis-8.6", "always", "power cut", 1, luck, shim)
    assert cell.confirmed > 0
    assert cell.done > 0
    assert (cell.lost, cell.back) == (0, 0)


@pytest.mark.fault(8, control=True)
def test_a_server_without_an_aof_loses_all(tmp_path: Path) -> None:
    cell = durability.measure("valkey-9", "no AOF", "kill -9", 1, random.Random(1), tmp_path)
    assert cell.lost == cell.confirmed > 0


def test_a_loss_that_settings_rule_out_is_seen() -> None:
    cell = {"confirmed": 9, "lost": 1}
    told = {"redis-8.6": {mode: {"kill -9": cell, "power cut": cell} for mode in durability.MODES}}
    assert durability.wrong(told) == [
        "redis-8.6, everysec, kill -9: 1 of 9 confirmed jobs lost",
        "redis-8.6, always, kill -9: 1 of 9 confirmed jobs lost",
        "redis-8.6, always, power cut: 1 of 9 confirmed jobs lost",
        'redis-8.6, everysec, `durable="disk"`, kill -9: 1 of 9 confirmed jobs lost',
        'redis-8.6, everysec, `durable="disk"`, power cut: 1 of 9 confirmed jobs lost',
    ]
    assert len(durability.wrong({"valkey-9": told["redis-8.6"]})) == 4, "its WAITAOF lies"
    assert durability.wrong({"redis-6.2": {"always": {"power cut": {"missing": "no"}}}}) == []


def test_idle_workers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "SETTLE_S", 0.0)
    told = asyncio.run(idle.measure("valkey-9", 2, 4.0))
    assert told["commands_per_s_and_worker"] > 0


def test_idle_workers_that_cost_too_much_are_seen() -> None:
    told = {"cpu_percent": 1.0, "commands_per_s_and_worker": 2.0}
    assert idle.wrong(told) == []
    assert idle.wrong(told | {"cpu_percent": 1.01}) == ["1.01 cpu_percent, not 1"]
    assert len(idle.wrong({"cpu_percent": 3.0, "commands_per_s_and_worker": 2.1})) == 2


def test_long_handlers_run_once() -> None:
    told = leases.measure("redis-8.6", 12, leases.SPARE + 3, seed=1)
    assert leases.wrong(told) == []
    assert told["blocking"] == 6


def test_without_leases_long_handlers_run_again() -> None:
    target = "tests.crash.workers:make_without_heartbeat"
    told = leases.measure("redis-8.6", 6, leases.SPARE + 3, seed=1, target=target)
    assert any("runs more than jobs" in line for line in leases.wrong(told))


def test_a_worker_consumes_after_each_restart() -> None:
    told = restarts.measure("valkey-9", 3, seed=1)
    assert told["recovered_s"]["count"] == 3
    assert (told["silent"], told["extra_runs"], told["faults"]) == ([], 0, {})


def test_dials_are_counted_by_the_second(valkey_9: Server) -> None:
    with restarts.Dials(valkey_9.url) as link:
        link.at_s = [0.0, 0.9, 1.0, 1.1, 1.8, 5.0]
        assert link.most_in_a_second(0.0, 9.0) == 4
        assert link.most_in_a_second(0.0, 1.0) == 2


@pytest.mark.parametrize("group", list(failovers.GROUPS))
def test_a_primary_that_is_replaced(group: str) -> None:
    told = failovers.measure("redis-8.6", group, 2, seed=1)
    assert told["took_s"]["count"] == 2
    assert told["confirmed"] > 0
    assert told["faults"] == {}


def test_cancelled_calls_leave_nothing_behind() -> None:
    told = asyncio.run(cancels.measure("valkey-9", 2_000, seed=1))
    assert cancels.wrong(told) == []
    assert told["cancelled"] >= 2_000


async def test_a_reply_of_another_call_is_seen() -> None:
    """The connection gives each call the answer to the one before."""

    class OutOfStep:
        last = b""

        async def submit(self, request: Any) -> bytes:
            found, OutOfStep.last = OutOfStep.last, request.frame.split(b"\r\n")[4]
            return found

    storm = cancels.Storm()
    tags = [storm._call(cancels._one, OutOfStep(), tag) for tag in range(5)]  # type: ignore[arg-type]
    await asyncio.gather(*tags)
    assert storm.mismatched == 5


def test_a_call_behind_garbage_that_is_answered_wrong_is_seen() -> None:
    """The connection answers it with what was left of the garbage."""

    class OutOfStep:
        def connect(self) -> None: ...

        def call_each(self, requests: Any, ahead: int) -> list[Any]:
            return [b"left", None]

    tally = garbage.Tally()
    into: Any = OutOfStep()
    garbage.into_blocking(into, tally, 5, random.Random(1))
    assert tally.mismatched == 1


def test_garbage_that_leaves_something_behind_is_seen() -> None:
    told = {"inputs": 7, **asdict(garbage.Tally(given=7, grown_mb=garbage.GROWTH_MB))}
    assert garbage.wrong(told) == []
    told |= {"given": 6, "grown_mb": garbage.GROWTH_MB + 1, "descriptors_left": 1, "failed": 1}
    assert len(garbage.wrong(told)) == 4


def test_nothing_grows_while_links_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CUT_S", 0.5)
    told = asyncio.run(soak.measure("valkey-9", 3, 0.5))
    assert told["links_cut"] > 0
    assert told["jobs"] > 50
    assert told["rss_mib_at_s"][round(told["last"]["at_s"])] > 0
    assert [line for line in soak.wrong(told) if "memory" not in line] == []  # too short for that


def test_what_grows_is_seen() -> None:
    samples = [soak.Sample(30.0 * n, 40 + n / 10, 7 + n / 20, n, 16, 1.0, 1) for n in range(100)]
    words = {"rss_mib_per_h": "rss_mib", "used_mib_per_h": "used_mib"}
    grown = {name: soak.slope_per_h(samples, what) for name, what in words.items()}
    grown["most_files"] = 17
    told = grown | {"first": asdict(samples[0]), "last": asdict(samples[0]) | {"keys": 2}}
    assert [*grown.values()][:2] == pytest.approx([12, 6])
    assert len(soak.wrong(told)) == 4


def test_every_slot_fires_once() -> None:
    told = slots.measure("valkey-9", 3_000, seed=1)
    assert slots.wrong(told) == []
    assert told["slots"] == told["fires"] >= 3_000


@pytest.mark.parametrize("fires", [2, 4])
def test_a_slot_that_fires_twice_or_not_is_seen(
    valkey_9: Server, queue_name: str, fires: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "REST_S", 0.1)
    with redis.Redis.from_url(valkey_9.url) as client:
        for _ in range(fires):
            client.xadd(queue_name, {ENVELOPE: hostile.envelope(7)})
        books = slots.Books(client, queue_name.encode(), specs={7: (0, 3_000, 1_000)})
        with pytest.raises(slots.WrongCountError, match=rf"here: .*7: \({fires}, 3\)"):
            books.rest("here")
