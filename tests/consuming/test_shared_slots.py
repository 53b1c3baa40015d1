"""Shared slots without a server: who gets the next one, and that none is lost."""

import random
from collections import Counter, deque

import pytest

from chasqui.consuming.shared_slots import Lane, SharedSlots


class Process:
    """Workers that share slots: entries at the server, entries here, and runs; all by hand."""

    def __init__(self, slots: SharedSlots, limit: int = 100) -> None:
        self.slots = slots
        self.lanes = {queue: slots.lane(queue) for queue in slots.queues}
        self.here: dict[str, deque[int]] = {queue: deque() for queue in self.lanes}
        self.server: Counter[str] = Counter()
        self.starts: list[str] = []
        for queue, lane in self.lanes.items():
            lane.open(self.here[queue], limit=limit)

    def wait(self, queue: str, count: int) -> None:
        """Let entries wait here."""
        self.here[queue].extend(range(count))
        self.lanes[queue].offered()

    def start(self) -> None:
        """Begin every run that is granted."""
        for queue, lane in self.lanes.items():
            while self.here[queue] and lane.take():
                self.here[queue].popleft()
                self.starts.append(queue)

    def end(self, queue: str) -> None:
        self.lanes[queue].give_back()
        self.start()

    def ask(self, queue: str) -> int:
        """What a reader does: ask for as many as are granted, and rest if fewer came."""
        lane = self.lanes[queue]
        room = lane.granted - len(self.here[queue])
        count = min(room, self.server[queue])
        self.server[queue] -= count
        self.wait(queue, count)
        if count < room:
            lane.is_empty = True
            lane.rest()
        self.start()
        return count

    def check(self) -> None:
        used = sum(lane.running + lane.granted for lane in self.lanes.values())
        assert used + self.slots.free == self.slots.total
        assert self.slots.free >= 0
        if self.slots.free:
            assert not any(lane.has_work() for lane in self.lanes.values()), "a slot lies idle"


def of(lane: Lane) -> tuple[int, int]:
    return lane.running, lane.granted


def test_an_earlier_queue_goes_first() -> None:
    process = Process(SharedSlots(2, ["urgent", "default"]))
    process.wait("default", 10)
    process.start()
    process.wait("urgent", 1)
    assert process.starts == ["default", "default"]
    process.end("default")
    process.end("default")
    assert process.starts[2:] == ["urgent", "default"]


def test_a_slot_is_kept_for_what_an_earlier_queue_may_have_at_the_server() -> None:
    process = Process(SharedSlots(1, ["urgent", "default"]))
    process.wait("default", 10)
    process.start()
    process.server["urgent"] = 1
    process.lanes["urgent"].stand_by()
    process.end("default")
    assert of(process.lanes["urgent"]) == (0, 1)
    assert process.starts == ["default"]
    assert process.ask("urgent") == 1
    process.end("urgent")
    assert process.ask("urgent") == 0, "it asked again before another begins"
    process.start()
    assert process.starts == ["default", "urgent", "default"]


@pytest.mark.parametrize("slots", [1, 2, 7, 50])
def test_starts_are_shared_exactly_by_weight(slots: int) -> None:
    process = Process(SharedSlots(slots, {"a": 3, "b": 1}, mode="weight"))
    for queue in process.lanes:
        process.wait(queue, 1000)
    process.start()
    while len(process.starts) < 400 + slots:
        process.end(next(queue for queue, lane in process.lanes.items() if lane.running))
    if slots == 1:
        assert Counter(process.starts[:400]) == {"a": 300, "b": 100}
        assert all(process.starts[n : n + 4].count("b") == 1 for n in range(0, 400, 4))
    assert abs(process.starts[:400].count("b") - 100) <= -(-slots // 4)


def test_turns_are_even() -> None:
    process = Process(SharedSlots(1, {"a": 5, "b": 1, "c": 1}, mode="weight"))
    for queue in process.lanes:
        process.wait(queue, 100)
    process.start()
    while len(process.starts) < 70:
        process.end(process.starts[-1])
    assert Counter(process.starts) == {"a": 50, "b": 10, "c": 10}
    text = "".join(process.starts)
    assert "aaaaaa" not in text
    assert "bb" not in text


def test_the_share_of_a_queue_without_jobs_goes_to_the_others_and_is_not_saved_up() -> None:
    process = Process(SharedSlots(1, {"a": 1, "b": 1}, mode="weight"))
    process.wait("a", 200)
    process.start()
    for _ in range(99):
        process.end("a")
    process.wait("b", 100)
    while len(process.starts) < 120:
        process.end(process.starts[-1])
    assert process.starts[:100] == ["a"] * 100
    assert Counter(process.starts[100:]) == {"a": 10, "b": 10}


def test_a_grant_that_found_nothing_costs_no_turn() -> None:
    process = Process(SharedSlots(1, {"a": 1, "b": 1}, mode="weight"))
    process.wait("b", 100)
    process.start()
    for _ in range(10):
        process.lanes["a"].stand_by()
        process.end("b")
        if process.lanes["a"].granted:
            process.ask("a")
    process.wait("a", 100)
    begun = len(process.starts)
    for _ in range(20):
        process.end(process.starts[-1])
    assert process.starts[begun:].count("a") in (10, 11), "and one that found none saved nothing up"


def test_a_worker_has_no_more_than_its_own_concurrency() -> None:
    process = Process(SharedSlots(10, ["a", "b"]), limit=3)
    process.wait("a", 10)
    process.wait("b", 10)
    process.start()
    assert Counter(process.starts) == {"a": 3, "b": 3}
    assert process.slots.free == 4


def test_a_queue_that_ends_leaves_its_slots_to_the_others() -> None:
    process = Process(SharedSlots(2, ["a", "b"]))
    process.wait("a", 5)
    process.wait("b", 5)
    process.lanes["a"].close()
    process.start()
    assert process.starts == ["b", "b"]
    process.check()


def test_batches_want_one_slot_for_many_entries() -> None:
    slots = SharedSlots(5, ["a"])
    lane = slots.lane("a")
    here = deque(range(25))
    lane.open(here, limit=5, batch=10)
    assert of(lane) == (0, 3)
    here.clear()
    lane.settle()
    assert slots.free == 5


@pytest.mark.parametrize("mode", ["strict", "weight"])
@pytest.mark.parametrize("seed", range(20))
def test_no_slot_is_lost_and_none_lies_idle(mode: str, seed: int) -> None:
    choose = random.Random(seed)
    queues = ["a", "b", "c"]
    weights = {queue: choose.randint(1, 5) for queue in queues}
    process = Process(SharedSlots(choose.randint(1, 6), weights, mode=mode), limit=4)  # type: ignore[arg-type]
    added = 0
    for _ in range(2000):
        queue = choose.choice(queues)
        lane = process.lanes[queue]
        match choose.randrange(6):
            case 0:
                process.server[queue] += (count := choose.randrange(4))
                added += count
            case 1:
                lane.stand_by()
            case 2 if lane.granted > len(process.here[queue]):
                process.ask(queue)
            case 3 if lane.running:
                process.end(queue)
            case 4:
                lane.rest()
            case 5:
                before = len(process.starts)
                process.start()
                if mode == "strict" and process.starts[before:] == ["c"]:
                    first = process.lanes["a"]
                    assert first.running + first.granted == 4 or not process.here["a"]
        process.check()
    while len(process.starts) < added:
        for queue, lane in process.lanes.items():
            lane.stand_by()
            process.ask(queue)
            while lane.running:
                process.end(queue)
    for lane in process.lanes.values():
        lane.rest()
    assert len(process.starts) == added
    assert process.slots.free == process.slots.total


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="slots must be"):
        SharedSlots(0, ["a"])
    with pytest.raises(ValueError, match="mode must be 'strict' or 'weight'"):
        SharedSlots(1, ["a"], mode="fair")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="write them as a list"):
        SharedSlots(1, "ab")
    with pytest.raises(ValueError, match="queues is empty"):
        SharedSlots(1, [])
    with pytest.raises(ValueError, match="the weight of queue 'a'"):
        SharedSlots(1, {"a": 0})
    with pytest.raises(ValueError, match=r"do not name queue 'urgnt': is it 'urgent'\?"):
        SharedSlots(1, ["urgent"]).lane("urgnt")
