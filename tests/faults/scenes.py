"""What is there before an operation, and what must be there in the end, wherever it broke off."""

import time
from collections.abc import Callable, Iterable

from chasqui import MissedFiresPolicy, RepeatPattern, sync
from chasqui._core.envelope import decode_envelope, encode_envelope
from chasqui.model.keys import DEFAULT_GROUP, ENVELOPE
from chasqui.model.payload import encode
from tests.faults import programs
from tests.faults.boundaries import Scene
from tests.faults.programs import BULK, FAR_MS, GONE, HANDED_BACK_MS

# ── What is there beforehand ────────────────────────────────────────────────────────────────────


def delayed(*, delay_ms: int, count: int) -> Callable[[Scene], range]:
    def prepare(scene: Scene) -> range:
        jobs = [
            {"name": "quick", "data": {"n": n}, "job_id": f"id-{n}", "delay_ms": delay_ms}
            for n in range(count)
        ]
        with sync.Queue(scene.queue_name, redis_url=scene.url) as queue:
            queue.add_bulk(jobs)
        return range(count)

    return prepare


def dead(scene: Scene) -> range:
    pipeline = scene.client.pipeline(transaction=False)
    for n in range(BULK):
        envelope = encode_envelope(f"id-{n}", encode({"n": n}), 0, 3)
        pipeline.xadd(scene.keys.dlq, {"d": envelope, "n": "quick", "reason": "failed"})
    pipeline.execute()
    return range(BULK)


def dead_with_ids(scene: Scene) -> range:
    """Their ids are taken: the first by a newer job, the others by the dead ones."""
    numbers, keys = dead(scene), scene.keys
    for marker in (keys.unique, keys.dlid):
        scene.client.mset({marker(f"id-{n}"): int(n == 0) for n in numbers})
    return numbers


def due(scene: Scene) -> range:
    """Specs whose only fire is due: more than one call fires."""
    with sync.Queue(scene.queue_name, redis_url=scene.url) as queue:
        for n in range(5):
            queue.upsert_repeatable_job(
                "quick", {"n": n}, repeat=RepeatPattern.every(FAR_MS), limit=1, key=f"key-{n}"
            )
            scene.client.zadd(scene.keys.repeat, {f"key-{n}": time.time_ns() // 10**6 - 1000})
    return range(5)


def overdue(scene: Scene) -> range:
    """A spec that owes five fires, the last it has: more than two calls fire."""
    with sync.Queue(scene.queue_name, redis_url=scene.url) as queue:
        queue.upsert_repeatable_job(
            "quick",
            {"n": 0},
            repeat=RepeatPattern.every(FAR_MS),
            limit=5,
            key="key",
            missed_fires=MissedFiresPolicy.fire_all(10),
        )
    first_ms = time.time_ns() // 10**6 - 4 * FAR_MS - 1000
    scene.client.zadd(scene.keys.repeat, {"key": first_ms})
    return range(1)


def gone(scene: Scene) -> range:
    """A consumer that holds nothing, beside one that holds a job."""
    waiting("quick")(scene)
    client, stream = scene.client, scene.keys.stream
    client.xgroup_create(stream, DEFAULT_GROUP, "0")
    client.xreadgroup(DEFAULT_GROUP, "holds", {stream: ">"})
    client.xgroup_createconsumer(stream, DEFAULT_GROUP, GONE)
    return range(1)


def waiting(name: str, count: int = 1) -> Callable[[Scene], range]:
    def prepare(scene: Scene) -> range:
        with sync.Queue(scene.queue_name, redis_url=scene.url) as queue:
            for n in range(count):
                queue.add(name, {"n": n}, job_id=f"id-{n}", attempts=3, backoff=FAR_MS)
        return range(count)

    return prepare


# ── What must be there in the end ───────────────────────────────────────────────────────────────


def only_in(place: str, jobs: Iterable[int]) -> Callable[[Scene], list[str]]:
    """All these are in one place, and the others are empty."""
    wanted: dict[str, list[int]] = {"stream": [], "delayed": [], "dlq": []}
    wanted[place] = sorted(jobs)

    def check(scene: Scene) -> list[str]:
        census = scene.census()
        found = {name: sorted(getattr(census, name)) for name in wanted}
        return [] if found == wanted else [f"jobs are here: {found}"]

    return check


def both(*checks: Callable[[Scene], list[str]]) -> Callable[[Scene], list[str]]:
    return lambda scene: [complaint for check in checks for complaint in check(scene)]


def _told(scene: Scene, event: bytes) -> list[int]:
    """How often the end of each job was told."""
    events = [fields for _, fields in scene.client.xrange(scene.keys.events)]
    ids = [fields[b"id"] for fields in events if fields[b"e"] == event]
    return [ids.count(b"id-%d" % n) for n in scene.present]


def told_once(event: bytes) -> Callable[[Scene], list[str]]:
    def check(scene: Scene) -> list[str]:
        times = _told(scene, event)
        return [] if set(times) == {1} else [f"told {times} times"]

    return check


def told_unless_killed(scene: Scene) -> list[str]:
    """Ends that are told behind the acknowledgement: all of them, over a lost link perhaps twice;
    or once at most, if a process died that had not come to tell them."""
    times = _told(scene, b"completed")
    allowed = {0, 1} if scene.ledger.count("dead") else {1, 2}
    return [] if set(times) <= allowed else [f"told {times} times"]


def kept_once(event: bytes) -> Callable[[Scene], list[str]]:
    """Each job is in the history once, with what it carried."""

    def check(scene: Scene) -> list[str]:
        kept = [fields for _, fields in scene.client.xrange(scene.keys.history)]
        found = [(fields[b"e"], decode_envelope(fields[ENVELOPE]).id) for fields in kept]
        wanted = [(event, f"id-{n}") for n in scene.present]
        return [] if sorted(found) == wanted else [f"in the history: {found}"]

    return check


def has_left(scene: Scene) -> list[str]:
    """No consumer is listed; or one that died, and holds nothing: the leader deletes it."""
    found = programs.listed(scene.client, scene.keys)
    pending = scene.client.xpending(scene.keys.stream, DEFAULT_GROUP)["pending"]
    is_right = not found or (found == [programs.NAME] and scene.ledger.count("dead"))
    return [] if is_right and not pending else [f"consumers: {found}, pending: {pending}"]


def fired_five_times(scene: Scene) -> list[str]:
    entries = scene.client.xrange(scene.keys.stream)
    ids = {decode_envelope(fields[ENVELOPE]).id for _, fields in entries}
    return [] if len(entries) == len(ids) == 5 else [f"{len(entries)} jobs, {len(ids)} ids"]


def held(scene: Scene) -> list[str]:
    """The job is where it was, with the one who holds it, and nobody else is listed."""
    pending = scene.client.xpending_range(scene.keys.stream, DEFAULT_GROUP, "-", "+", 10)
    found = [one["consumer"].decode() for one in pending], programs.listed(scene.client, scene.keys)
    complaints = only_in("stream", [0])(scene)
    return complaints + ([] if found == (["holds"], ["holds"]) else [f"held by, listed: {found}"])


def freed(*taken: str) -> Callable[[Scene], list[str]]:
    """No ids are taken but these."""

    def check(scene: Scene) -> list[str]:
        keys = scene.keys
        patterns = keys.unique("*"), keys.dlid("*")
        found = {key for one in patterns for key in scene.client.scan_iter(one)}
        wanted = {key for one in taken for key in (keys.unique(one), keys.dlid(one))}
        return [] if found == wanted else [f"taken: {sorted(found)}"]

    return check


def indexed(place: str, jobs: Iterable[int]) -> Callable[[Scene], list[str]]:
    """The same, and the index of delayed jobs holds those that are delayed, and no others."""

    def check(scene: Scene) -> list[str]:
        members = sorted(scene.client.zrange(scene.keys.delayed, 0, -1))
        names = scene.client.scan_iter(scene.keys.didx("*"))
        found = sorted(scene.client.get(name) for name in names)
        return only_in(place, jobs)(scene) + ([] if found == members else [f"indexed: {found}"])

    return check


def cancelled(scene: Scene) -> list[str]:
    marker = scene.client.exists(scene.keys.didx("id-0"))
    return only_in("delayed", [1])(scene) + (["its marker is left"] if marker else [])


def rescheduled(scene: Scene) -> list[str]:
    scores = [score for _, score in scene.client.zrange(scene.keys.delayed, 0, -1, withscores=True)]
    later = time.time() * 1000 + 1.5 * FAR_MS
    return [] if [score > later for score in scores] == [False, True] else [f"scores: {scores}"]


def replayed(scene: Scene) -> list[str]:
    entries = scene.client.xrange(scene.keys.stream)
    attempts = {decode_envelope(fields[ENVELOPE]).attempt for _, fields in entries}
    complaints = only_in("stream", range(BULK))(scene)
    return complaints + ([] if attempts == {0} else [f"attempts: {attempts}"])


def result_stored(scene: Scene) -> list[str]:
    with sync.Queue(scene.queue_name, redis_url=scene.url) as queue:
        result = queue.get_job_result("id-0")
    return only_in("stream", [])(scene) + ([] if result == 0 else [f"the result is {result}"])


def handed_back(scene: Scene) -> list[str]:
    """What has not been done is free for whoever comes next."""
    held = scene.client.xpending_range(scene.keys.stream, DEFAULT_GROUP, "-", "+", 10)
    kept = [one for one in held if one["time_since_delivered"] < HANDED_BACK_MS]
    done = {fact.n for fact in scene.ledger.read("end")}
    complaints = only_in("stream", set(scene.present) - done)(scene)
    return complaints + ([f"not handed back: {kept}"] if kept else [])
