"""A short run of the chaos, and controls: what is broken on purpose must be seen."""

import signal

import pytest

from tests.chaos.__main__ import run
from tests.chaos.scene import KINDS, Kind, Scene, Skipped
from tests.chaos.schedule import draw, kinds_of, redraw
from tests.chaos.stage import Stage
from tests.chaos.subjects import SUBJECTS

SEED = 20_260_807


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("server", ["redis-8.6", "redis-6.2", "valkey-9"])
def test_nothing_is_lost(server: str) -> None:
    result = run(SUBJECTS["chasqui"], server, jobs=5_000, faults=15, seed=SEED, lease_ms=2_000)
    print(result)
    assert result.violations == []
    assert sum(result.faults.values()) == 15
    assert result.jobs == 5_000
    assert result.confirmed + result.refused + result.unknown == 5_000
    assert result.completed > 4_000
    assert result.dead > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_is_lost_of_many() -> None:
    """As large as in CI; it takes about a minute."""
    result = run(SUBJECTS["chasqui"], "redis-8.6", jobs=100_000, faults=30, seed=SEED)
    print(result)
    assert result.violations == []
    assert sum(result.faults.values()) == 30
    assert result.confirmed + result.refused + result.unknown == result.jobs == 100_000


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_that_acknowledges_first_loses_jobs() -> None:
    result = run(
        SUBJECTS["broken"], "valkey-9", jobs=2_000, faults=3, seed=SEED, only=["worker killed"]
    )
    assert result.lost > 0
    assert any(violation.startswith("lost") for violation in result.violations)
    assert result.unexpected == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_fault_that_finds_nothing_to_strike_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(scene: Scene) -> None:
        raise Skipped

    monkeypatch.setitem(KINDS, "nothing there", Kind("nothing there", strike, is_general=True))
    result = run(
        SUBJECTS["chasqui"], "valkey-9", jobs=500, faults=4, seed=SEED,
        only=["nothing there", "link cut"],
    )  # fmt: skip
    assert result.violations == []
    assert result.faults == {"link cut": 4}
    assert len(result.resumed_s) == 4


@pytest.mark.slow
def test_a_worker_that_must_drain_is_told_from_one_that_found_no_server() -> None:
    sizes = {"jobs": 10, "workers": 1, "producers": 1, "lease_ms": 2_000}
    with Stage(SUBJECTS["chasqui"], "valkey-9", **sizes) as stage:
        (worker,) = stage.workers
        stage.server.kill()
        worker.start()
        assert worker.wait(30) == 1
        assert not worker.has_read
        stage.server.start()
        worker.start()
        worker.link.wait_for(lambda: b"XREADGROUP" in worker.link.commands)
        worker.signal(signal.SIGTERM)
        assert worker.wait(30) == 0
        assert worker.has_read


def test_a_seed_gives_one_schedule() -> None:
    kinds = kinds_of()
    assert draw(7, 60, kinds) == draw(7, 60, kinds)
    assert draw(7, 60, kinds) != draw(8, 60, kinds)


def test_what_strikes_instead_follows_from_the_seed_and_comes_to_an_end() -> None:
    kinds = kinds_of()

    def line() -> list[str]:
        strike, names = draw(7, 1, kinds)[0], []
        while (instead := redraw(strike, kinds)) is not None:
            assert instead.at == strike.at
            names.append(instead.kind.name)
            strike = instead
        return names

    assert line() == line()
    assert len(set(line())) > 5


def test_a_schedule_has_all_kinds_and_some_at_once() -> None:
    kinds = kinds_of()
    schedule = draw(7, len(kinds), kinds)
    assert len(kinds) >= 15
    assert {strike.kind.name for strike in schedule} == {kind.name for kind in kinds}
    moments = [strike.at for strike in schedule]
    assert moments == sorted(moments)
    assert len(set(moments)) < len(moments)


def test_other_queues_get_the_faults_that_are_not_ours_alone() -> None:
    general = {kind.name for kind in kinds_of(is_general=True)}
    assert {"worker killed", "server killed", "link cut", "rolling restart"} <= general
    assert not general & {"SCRIPT FLUSH", "group destroyed"}
    with pytest.raises(ValueError, match="no such fault: SCRIPT FLUSH"):
        kinds_of(is_general=True, only=["SCRIPT FLUSH"])
