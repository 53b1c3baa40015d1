"""Operations that break off before or after any of their commands: nothing is lost or doubled."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import programs
from tests.faults.boundaries import CUTS, DEATHS, Operation, Scene, Trial, is_any
from tests.faults.flow_scenes import (
    begun,
    counted,
    ended_with,
    flow,
    placed,
    told_of,
    with_a_dead_child,
)
from tests.faults.programs import BULK, FAR_MS, Producing, Working
from tests.faults.scenes import (
    both,
    cancelled,
    dead,
    dead_with_ids,
    delayed,
    due,
    fired_five_times,
    freed,
    gone,
    handed_back,
    has_left,
    held,
    indexed,
    kept_once,
    only_in,
    overdue,
    replayed,
    rescheduled,
    result_stored,
    told_once,
    told_unless_killed,
    waiting,
)
from tests.proxy import Fault
from tests.servers import RemoteServer, Server

FAULTS = {
    "link cut before": Fault.CUT_BEFORE,
    "reply lost": Fault.CUT_AFTER,
    "link cut behind": Fault.CUT_BEHIND,
    "killed before": Fault.HOLD_BEFORE,
    "killed after": Fault.HOLD_AFTER,
}

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
        "begin a flow": Operation(
            Producing(programs.begin_flow, many, is_blocking=is_blocking),
            check=both(only_in("stream", many), begun),
            core=("EVALSHA flow_begin", "EVAL flow_begin"),
        ),
        "replay a step": other(
            programs.replay,
            prepare=with_a_dead_child(is_replayed=False),
            check=both(placed(stream=[1], dlq=[2]), counted(0, 1)),
            core=("EVALSHA replay",),
        ),
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
        "delete dead": other(
            programs.delete_dead,
            removes=many,
            prepare=dead_with_ids,
            check=both(only_in("dlq", []), freed("id-0")),
            core=("EVALSHA delete_dead",),
        ),
        "free": other(
            programs.free, prepare=waiting("quick"), check=both(only_in("stream", one), freed())
        ),
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
    "fire in steps": Operation(
        programs.fire_in_steps,
        prepare=overdue,
        check=fired_five_times,
        core=("EVALSHA fire", "EVAL fire"),
        own=lambda command: command.endswith(" fire"),
        has_copies=True,
    ),
    "sweep": Operation(
        programs.sweep,
        prepare=gone,
        check=held,
        core=("EVALSHA sweep", "EVAL sweep"),
        own=lambda command: command.endswith(" sweep"),
    ),
    "ack": Operation(
        Working(Working.is_done),
        prepare=waiting("quick", 3),
        check=only_in("stream", []),
        core=("EVALSHA join", "EVAL join", "EVALSHA leave", "EVAL leave"),
        either=("XACKDEL", "EVALSHA ack"),
    ),
    "ack with events": Operation(
        Working(Working.is_done, events_enabled=True),
        prepare=waiting("quick", 3),
        check=both(only_in("stream", []), told_unless_killed),
        either=("XACKDEL", "EVAL ack"),  # with the source: behind it are the events
        own=lambda command: command in ("XADD", "XACKDEL", "EVAL ack"),
    ),
    "ack with result": Operation(
        Working(Working.is_done, store_results=True, events_enabled=True),
        prepare=waiting("quick"),
        check=both(result_stored, told_once(b"completed")),
        core=("EVALSHA complete", "EVAL complete"),
    ),
    "ack in doubt": Operation(
        Working(Working.is_done, patch=programs.doubt, events_enabled=True),
        prepare=waiting("quick", 3),
        check=both(only_in("stream", []), told_once(b"completed")),
        core=("EVALSHA complete", "EVAL complete"),
        own=lambda command: command.endswith(" complete"),
    ),
    "ack with history": Operation(
        Working(Working.is_done, history=True),
        prepare=waiting("quick", 3),
        check=both(only_in("stream", []), kept_once(b"completed")),
        core=("EVALSHA complete", "EVAL complete"),
        own=lambda command: command.endswith(" complete"),
    ),
    "retry": Operation(
        Working(Working.is_done),
        prepare=waiting("fail"),
        check=indexed("delayed", [0]),
        core=("EVALSHA retry", "EVAL retry"),
    ),
    "bury": Operation(
        Working(Working.is_done, events_enabled=True),
        prepare=waiting("bury"),
        check=both(only_in("dlq", [0]), told_once(b"dlq")),
        core=("EVALSHA bury", "EVAL bury"),
    ),
    "bury with history": Operation(
        Working(Working.is_done, history=True),
        prepare=waiting("bury"),
        check=both(only_in("dlq", [0]), kept_once(b"dlq")),
        core=("EVALSHA bury", "EVAL bury"),
        own=lambda command: command.endswith(" bury"),
    ),
    "end steps": Operation(
        Working(Working.is_done, events_enabled=True),
        prepare=flow([["quick", "quick", "quick"]]),
        check=both(
            only_in("stream", []),
            ended_with("0.2", 2),
            told_of(b"completed", "0.0", "0.1", "0.2"),
        ),
        core=("EVALSHA flow_step", "EVAL flow_step"),
        own=lambda command: command.endswith(" flow_step"),
    ),
    "join": Operation(
        Working(Working.is_done, events_enabled=True),
        prepare=flow([["quick", "quick"], ["quick"], ["quick"]], ["quick", "quick"]),
        check=both(
            only_in("stream", []),
            counted(0, 0),
            ended_with("j.1", 5),
            told_of(b"completed", "0.0", "0.1", "1.0", "2.0", "j.0", "j.1"),
        ),
        core=("EVALSHA flow_step", "EVAL flow_step"),
        own=lambda command: command.endswith(" flow_step"),
    ),
    "bury a step": Operation(
        Working(Working.is_done, events_enabled=True),
        prepare=flow([["quick"], ["bury", "quick"]], ["quick", "quick"], owed=[4]),
        check=both(
            placed(dlq=[1, 4]),
            counted(0, 1),
            told_of(b"dlq", "1.0", "j.1"),
            told_of(b"completed", "0.0"),
        ),
        core=("EVALSHA flow_bury", "EVAL flow_bury"),
        own=lambda command: command.endswith((" flow_bury", " flow_step")),
    ),
    "end a replayed step": Operation(
        Working(Working.is_done, events_enabled=True),
        prepare=with_a_dead_child(is_replayed=True),
        check=both(placed(), counted(0, 0), ended_with("j.0", 2)),
        core=("EVALSHA flow_step", "EVAL flow_step"),
        own=lambda command: command.endswith(" flow_step"),
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
    "hand back": Operation(
        Working(Working.lets_go, patch=programs.read_ahead_once, concurrency=1, read_count=5),
        prepare=waiting("hold", 3),
        check=only_in("stream", []),
        core=("EVALSHA release", "EVAL release"),
        own=lambda command: command.endswith((" release", " recover")),
    ),
    "leave": Operation(
        Working(Working.is_done),
        prepare=waiting("quick"),
        check=has_left,
        core=("EVALSHA leave", "EVAL leave"),
        own=lambda command: command.endswith(" leave"),
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
        pytest.param(
            programs.CarelessStep(is_ack_first=True),
            flow([["quick", "quick"]]),
            "lost",
            id="end a step first",
        ),
        pytest.param(
            programs.CarelessStep(is_ack_first=False),
            flow([["quick", "quick"]]),
            "doubled",
            id="add the next first",
        ),
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
