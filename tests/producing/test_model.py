"""Any row of calls, on a small pool of ids, does what a model of the queue in plain Python does."""

import random
from typing import Any

import msgpack
import pytest
import redis as redis_py

from chasqui.model.keys import Keys


class Model:
    """What a queue should hold."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.delayed: dict[str, int] = {}
        self.taken: set[str] = set()

    def add(self, entry: dict[str, Any], job_id: str) -> bool:
        """Whether the job is new."""
        if "job_id" in entry:
            if job_id in self.taken:
                return False
            self.taken.add(job_id)
        if "delay_ms" in entry:
            self.delayed[job_id] = entry["data"]
        else:
            self.waiting.append(entry["data"])
        return True

    def cancel(self, job_id: str) -> bool:
        if self.delayed.pop(job_id, None) is None:
            return False
        self.taken.discard(job_id)
        return True


@pytest.mark.parametrize("seed", range(3))
async def test_a_row_of_calls(seed: int, queue: Any, redis: redis_py.Redis, keys: Keys):
    dice = random.Random(seed)
    model = Model()
    numbers = iter(range(10**6))
    known = [f"id-{n}" for n in range(12)]

    def entry() -> dict[str, Any]:
        made: dict[str, Any] = {"name": dice.choice(["", "a", "é"]), "data": next(numbers)}
        if dice.random() < 0.4:
            made["job_id"] = dice.choice(known[:12])
        if dice.random() < 0.4:
            made["delay_ms"] = dice.randrange(100_000, 900_000)
        if dice.random() < 0.2:
            made["attempts"] = dice.randrange(1, 99)
        return made

    def learn(one: dict[str, Any], job: Any) -> None:
        assert job.is_new == model.add(one, job.id), one
        if "delay_ms" in one and "job_id" not in one:
            known.append(job.id)

    for _ in range(150):
        match dice.randrange(5):
            case 0 | 1:
                one = entry()
                learn(one, await queue.add(one.pop("name"), one["data"], **without_data(one)))
            case 2:
                entries = [entry() for _ in range(dice.choice([1, 2, 9, 30]))]
                for one, job in zip(entries, await queue.add_bulk(entries), strict=True):
                    learn(one, job)
            case 3:
                ids = list(dict.fromkeys(dice.choices(known, k=4)))
                assert await queue.cancel_delayed_bulk(ids) == [model.cancel(one) for one in ids]
            case 4:
                job_id = dice.choice(known)
                moved = await queue.reschedule(job_id, delay_ms=dice.randrange(10**5, 10**6))
                assert moved == (job_id in model.delayed)
    stream = [msgpack.unpackb(fields[b"d"]) for _, fields in redis.xrange(keys.stream)]
    assert [msgpack.unpackb(fields[1]) for fields in stream] == model.waiting
    members = redis.zrange(keys.delayed, 0, -1)
    delayed = [msgpack.unpackb(member[4 + member[0] :]) for member in members]
    assert {fields[0]: msgpack.unpackb(fields[1]) for fields in delayed} == model.delayed
    for job_id in model.delayed:
        assert redis.get(keys.didx(job_id)) in members


def without_data(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "data"}
