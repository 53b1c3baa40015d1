"""Jobs added and awaited by DAGs, in a real Airflow."""

import asyncio
from collections.abc import Callable
from typing import Any

import redis as redis_py

import chasqui
from chasqui import sync
from chasqui.model.keys import Keys
from tests.airflow.conftest import PASSWORD
from tests.servers import Server

Airflow = Callable[..., Any]


def test_jobs_of_a_run_are_added_run_and_awaited(
    airflow: Airflow, redis_86: Server, queue_name: str
) -> None:
    jobs = [{"data": {"page": i}} for i in range(3)] + [{"data": "own", "job_id": "mine"}]
    told = airflow("many", {"queue": queue_name, "url": redis_86.url, "jobs": jobs})
    assert told["states"] == {"add[-1]": "success", "work[-1]": "success", "wait[-1]": "success"}
    ids = told["returned"]["add[-1]"]
    assert ids == [f"many/{told['run_id']}/add/{i}" for i in range(3)] + ["mine"]
    seen = told["returned"]["work[-1]"]
    assert sorted(map(str, seen)) == sorted(str(job["data"]) for job in jobs)


def test_a_dead_job_fails_the_sensor_with_its_reason(
    airflow: Airflow, redis_86: Server, queue_name: str
) -> None:
    conf = {"queue": queue_name, "url": redis_86.url, "jobs": [{"data": "good"}, {"data": "bad"}]}
    told = airflow("many", conf)
    assert told["states"]["wait[-1]"] == "failed"
    job_id = f"many/{told['run_id']}/add/1"
    reason = f"job {job_id} went to the dead-letter queue (unrecoverable)"
    assert f"{reason}: UnrecoverableError: no such customer" in told["log"]


def test_a_retried_task_adds_nothing_twice(
    airflow: Airflow, redis_86: Server, queue_name: str
) -> None:
    told = airflow("forgetful", {"queue": queue_name})
    assert told["states"] == {"add[-1]": "success"}
    assert told["returned"]["add[-1]"] == [f"forgetful/{told['run_id']}/add/0"]
    with redis_py.Redis.from_url(redis_86.url) as redis:
        assert redis.xlen(Keys(queue_name).stream) == 1
    again = airflow("forgetful", {"queue": queue_name})
    assert again["run_id"] != told["run_id"]
    with sync.Queue(queue_name, redis_url=redis_86.url) as queue:
        assert queue.counts().waiting == 2, "another run has jobs of its own"


def test_mapped_tasks_have_jobs_of_their_own(
    airflow: Airflow, redis_86: Server, queue_name: str
) -> None:
    told = airflow("mapped", {"queue": queue_name})
    ids = [told["returned"][f"add[{i}]"] for i in range(3)]
    assert ids == [[f"mapped/{told['run_id']}/add/{i}/0"] for i in range(3)]
    assert told["states"]["wait[-1]"] == "failed", "nobody works on them"
    assert "Sensor has timed out" in told["log"]


def test_a_queue_is_awaited_until_it_is_empty(
    airflow: Airflow, redis_86: Server, queue_name: str
) -> None:
    told = airflow("drained", {"queue": queue_name, "url": redis_86.url})
    assert set(told["states"].values()) == {"success"}


async def test_deferred_sensors_wait_in_the_triggerer(
    airflow: Airflow, redis_86: Server, queue_name: str
) -> None:
    keys = Keys(queue_name)

    async def work() -> None:
        async with asyncio.timeout(100):
            with redis_py.Redis.from_url(redis_86.url) as redis:
                while True:
                    if redis.xlen(keys.stream):
                        break
                    await asyncio.sleep(0.05)
        ran = asyncio.Event()

        async def handle(job: chasqui.Job) -> None:
            ran.set()

        worker = chasqui.Worker(queue_name, handle, redis_url=redis_86.url)
        running = asyncio.ensure_future(worker.run())
        async with asyncio.timeout(60):
            await ran.wait()
        await worker.close()
        await running

    told, _ = await asyncio.gather(
        asyncio.to_thread(airflow, "deferred", {"queue": queue_name}), work()
    )
    assert set(told["states"].values()) == {"success"}


def test_a_connection_of_airflow_names_the_server(
    airflow: Airflow, locked_server: Server, queue_name: str
) -> None:
    told = airflow("locked", {"queue": queue_name})
    assert told["states"] == {"add[-1]": "success"}
    with redis_py.Redis.from_url(locked_server.url, password=PASSWORD) as redis:
        assert redis.xlen(Keys(queue_name).stream) == 1
    assert PASSWORD not in told["log"]


def test_a_job_that_the_queue_never_had_is_an_error(airflow: Airflow, queue_name: str) -> None:
    told = airflow("unknown", {"queue": queue_name})
    assert told["states"] == {"wait[-1]": "failed"}
    assert f"queue '{queue_name}' knows no job 'never-added'" in told["log"]
