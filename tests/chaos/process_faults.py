"""Faults of processes: killed, stopped, told to go."""

import signal
import time

from tests.chaos.scene import Scene, fault
from tests.chaos.stage import Member

#: A worker that is told to go has this long; its handlers take a lease and a third.
DRAIN_S = 25.0


@fault("worker killed", general=True)
def kill_worker(scene: Scene) -> None:
    with scene.member(*scene.stage.workers) as worker:
        _kill(scene, worker)
        scene.last(0, 1.0)
        worker.start()


@fault("worker killed, none in its place for a lease", general=True)
def kill_worker_for_long(scene: Scene) -> None:
    with scene.member(*scene.stage.workers) as worker:
        _kill(scene, worker)
        scene.last(scene.lease_s, scene.lease_s * 1.5)
        worker.start()


@fault("worker stopped past its lease", general=True)
def zombie(scene: Scene) -> None:
    with scene.member(*scene.stage.workers) as worker:
        worker.signal(signal.SIGSTOP)
        scene.may_repeat(worker)
        scene.record.lost = (worker.who,)
        scene.last(scene.lease_s * 1.3, scene.lease_s * 2)
        worker.signal(signal.SIGCONT)
        scene.record.awaits = (worker.who,)


@fault("worker stopped for a moment", general=True)
def pause_worker(scene: Scene) -> None:
    with scene.member(*scene.stage.workers) as worker, scene.outage(worker):
        worker.signal(signal.SIGSTOP)
        scene.last(0.05, scene.lease_s / 4)
        worker.signal(signal.SIGCONT)
        scene.record.awaits = (worker.who,)


@fault("rolling restart", general=True)
def rolling_restart(scene: Scene) -> None:
    """All workers, one after the other. Not one job may run twice."""
    for place in scene.stage.workers:
        if scene.stop.is_set():
            return
        with scene.member(place) as worker:
            worker.wait_until_up(DRAIN_S)
            worker.signal(signal.SIGTERM)
            code = worker.wait(DRAIN_S)
            if scene.stage.subject.is_ours and code != 0 and worker.has_read:
                words = worker.last_words()
                scene.record.error = f"{worker.who} ended with {code} and did not drain: {words}"
            worker.start()
    scene.record.target = "all workers"


@fault("second SIGTERM")
def hasty_stop(scene: Scene) -> None:
    with scene.member(*scene.stage.workers) as worker:
        worker.wait_until_up(DRAIN_S)
        worker.signal(signal.SIGSTOP)
        scene.may_repeat(worker)
        worker.signal(signal.SIGTERM)
        worker.signal(signal.SIGCONT)
        time.sleep(0.2)
        if worker.is_running:
            worker.signal(signal.SIGTERM)
        worker.wait(DRAIN_S)
        worker.start()


@fault("all workers killed", general=True)
def kill_all(scene: Scene) -> None:
    for place in scene.stage.workers:
        with scene.member(place) as worker:
            _kill(scene, worker)
            worker.start()
    scene.record.target = "all workers"


@fault("producer killed", general=True)
def kill_producer(scene: Scene) -> None:
    with scene.member(*scene.stage.producers) as producer:
        producer.kill()
        scene.last(0, 0.5)
        first, last = producer.numbers_left()
        if first < last:
            producer.start(numbers=(first, last))


@fault("producer stopped for a while", general=True)
def pause_producer(scene: Scene) -> None:
    with scene.member(*scene.stage.producers) as producer:
        producer.signal(signal.SIGSTOP)
        scene.last(0.5, 3.0)
        producer.signal(signal.SIGCONT)


def _kill(scene: Scene, worker: Member) -> None:
    """Stopped first, so that what it holds is known exactly when it dies."""
    worker.signal(signal.SIGSTOP)
    scene.may_repeat(worker)
    worker.kill()
    scene.record.lost += (worker.who,)
