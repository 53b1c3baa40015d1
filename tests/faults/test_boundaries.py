"""Operations that break off before or after any of their commands: nothing is lost or doubled."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from chasqui import RepeatPattern, sync
from chasqui._core.envelope import decode_envelope, encode_envelope
from chasqui.keys import DEFAULT_GROUP, ENVELOPE
from chasqui.payload import encode
from tests.faults import programs
from tests.faults.boundaries import CUTS, DEATHS, Operation, Scene, Trial, is_any
from tests.faults.programs import BULK, FAR_MS, HANDED_BACK_MS, Producing, Working
from tests.proxy import Fault
from tests.servers import RemoteServer, Server

FAULTS = {
    "link cut before": Fault.CUT_BEFORE,
    "reply lost": Fault.CUT_AFTER,
    "link cut behind": Fault.CUT_BEHIND,
    "killed before": Fault.HOLD_BEFORE,
    "killed after": Fault.HOLD_AFTER,
}

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


def due(scene: Scene) -> range:
    """Specs whose only fire is due: more than one call fires."""
    with sync.Queue(scene.queue_name, redis_url=scene.url) as queue:
        for n in range(5):
            queue.upsert_repeatable_job(
                "quick", {"n": n}, repeat=RepeatPattern.every(FAR_MS), limit=1, key=f"key-{n}"
            )
            scene.client.zadd(scene.keys.repeat, {f"key-{n}": time.time_ns() // 10**6 - 1000})
    return range(5)


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


# ── Operations ──────────────────────────────────────────────────────────────────────────────────


def _producing(is_blocking: bool) -> dict[str, Operation]:
    one, many = range(1), range(BULK)

    def adding(
        step: Callable[..., object], adds: range, place: str, **options: object
    ) -> Operation:
        program = Producing(step, adds, is_blocking=is_blocking)
        return Operation(program, check=only_in(place, adds), **options)

    def other(
        step: Callable[..., object], *, removes: range = range(0), **options: object
    ) -> Operation:
        return Operation(Producing(step, removes=removes, is_blocking=is_blocking), **options)

    return {
        "add": adding(programs.add, one, "stream", is_repeated=False, own=is_any),
        "add with id": adding(programs.add_with_id, one, "stream"),
        "delay": adding(programs.delay, one, "delayed", is_repeated=False),
        "delay with id": adding(programs.delay_with_id, one, "delayed"),
        "bulk": adding(programs.bulk, many, "stream", is_repeated=False),
        "mixed bulk": Operation(Producing(programs.mixed_bulk, many, is_blocking=is_blocking)),
        "cancel": other(
            programs.cancel,
            removes=one,
            prepare=delayed(delay_ms=FAR_MS, count=2),
            check=cancelled,
            core=("EVALSHA cancel", "EVAL cancel"),
        ),
        "reschedule": other(
            programs.reschedule, prepare=delayed(delay_ms=FAR_MS, count=2), check=rescheduled
        ),
        "replay": other(programs.replay, prepare=dead, check=replayed, core=("EVALSHA replay",)),
    }


OPERATIONS = {
    **{f"{name}, asyncio": one for name, one in _producing(False).items()},
    **{f"{name}, blocking": one for name, one in _producing(True).items()},
    "promote": Operation(
        programs.promote,
        prepare=delayed(delay_ms=1, count=5),
        check=indexed("stream", range(5)),
        core=("EVALSHA promote", "EVAL promote"),
    ),
    "fire": Operation(
        programs.fire, prepare=due, check=only_in("stream", range(5)), core=("EVALSHA fire",)
    ),
    "ack": Operation(
        Working(Working.is_done, events_enabled=True),
        prepare=waiting("quick", 3),
        check=only_in("stream", []),
        either=("XACKDEL", "EVALSHA ack"),
    ),
    "ack with result": Operation(
        Working(Working.is_done, store_results=True),
        prepare=waiting("quick"),
        check=result_stored,
        core=("EVALSHA complete", "EVAL complete"),
    ),
    "retry": Operation(
        Working(Working.is_done),
        prepare=waiting("fail"),
        check=indexed("delayed", [0]),
        core=("EVALSHA retry", "EVAL retry"),
    ),
    "bury": Operation(
        Working(Working.is_done),
        prepare=waiting("bury"),
        check=only_in("dlq", [0]),
        core=("EVALSHA bury", "EVAL bury"),
    ),
    "renew": Operation(
        Working(Working.is_renewed, claim_min_idle_ms=600),
        prepare=waiting("hold"),
        check=only_in("stream", []),
        core=("EVALSHA renew", "EVAL renew"),
        own=lambda command: command.endswith(" renew"),
    ),
    "drain": Operation(
        Working(Working.holds_all, concurrency=1, read_count=5),
        prepare=waiting("hold", 5),
        check=handed_back,
        core=("EVALSHA release", "EVAL release"),
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_is_lost_or_doubled(
    name: str, fault: str, server: Server | RemoteServer, queue_name: str, tmp_path: Path
) -> None:
    operation = OPERATIONS[name]
    trial = Trial(operation, server.url, queue_name, tmp_path)
    boundaries = trial.learn()
    wrong, missed = {}, []
    for boundary in boundaries:
        complaints = trial.break_off(boundary, FAULTS[fault])
        if complaints is None:  # a wait that was not answered, or a look that was not needed
            missed.append(boundary)
        elif complaints:
            wrong[str(boundary)] = complaints
    print(f"{len(boundaries)} boundaries, not reached: {', '.join(map(str, missed)) or 'none'}")
    assert wrong == {}
    if isinstance(operation.program, Producing):
        assert missed == []
    # How often a duty looks again is its own affair; that it comes by at all is not.
    reached = {boundary.command for boundary in boundaries if boundary not in missed}
    assert reached
    assert {boundary.command for boundary in missed} & set(operation.core) <= reached
    assert not operation.either or reached & set(operation.either)


@pytest.mark.parametrize(
    ("program", "prepare", "finding"),
    [
        pytest.param(programs.Careless(is_ack_first=True), waiting("bury"), "lost", id="ack first"),
        pytest.param(
            programs.Careless(is_ack_first=False), waiting("bury"), "doubled", id="copy first"
        ),
        pytest.param(programs.add_carelessly, lambda scene: range(0), "doubled", id="add again"),
    ],
)
@pytest.mark.parametrize("faults", [CUTS, DEATHS], ids=["cuts", "deaths"])
def test_what_is_done_in_steps_is_caught(
    program: Callable[..., None],
    prepare: Callable[[Scene], range],
    finding: str,
    faults: tuple[Fault, ...],
    valkey_9: Server,
    queue_name: str,
    tmp_path: Path,
) -> None:
    trial = Trial(Operation(program, prepare), valkey_9.url, queue_name, tmp_path)
    found = [
        f"{boundary}, {fault.name}: {complaint}"
        for boundary in trial.learn()
        for fault in faults
        for complaint in trial.break_off(boundary, fault) or []
    ]
    assert any(finding in complaint for complaint in found), found
