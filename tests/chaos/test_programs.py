"""The programs that measure one thing each, in small: they count right."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.chaos import durability, hostile, idle
from tests.faults.disk import build_shim

pytestmark = pytest.mark.slow


def test_hostile_entries_are_buried_and_good_ones_done() -> None:
    told = asyncio.run(hostile.measure("valkey-9", 400, seed=1))
    assert (told["done"], told["runs"], told["buried"], told["left"]) == (400, 400, 400, 0)


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


def test_idle_workers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "SETTLE_S", 0.2)
    told = asyncio.run(idle.measure("valkey-9", 2, 1.0))
    assert told["commands_per_s_and_worker"] > 0
