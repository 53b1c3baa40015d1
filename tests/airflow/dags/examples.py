"""The DAGs that the tests run. Read by Airflow; queues come with a run's configuration."""

import asyncio
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, task

import chasqui
from chasqui.integrations.airflow import EnqueueOperator, JobSensor, QueueDrainedSensor

QUEUE = "{{ dag_run.conf['queue'] }}"
HERE = {"url_env": "JOBS_REDIS_URL"}
SOON: dict[str, Any] = {"poke_interval": 0.2, "timeout": 20}


class ForgetfulOperator(EnqueueOperator):
    """Adds its jobs, and dies before it has said so, the first time."""

    def execute(self, context: Any) -> list[str]:
        ids = super().execute(context)
        if context["ti"].try_number == 1:
            raise ConnectionError("the answer was lost")
        return ids


@task
def work(url: str, queue: str, jobs: int) -> list[Any]:
    """A worker that runs so many jobs."""
    seen: list[Any] = []

    async def handle(job: chasqui.Job) -> None:
        seen.append(job.data)
        if len(seen) >= jobs:
            asyncio.get_running_loop().call_soon(worker.close_soon)
        if job.data == "bad":
            raise chasqui.UnrecoverableError("no such customer")

    class Once(chasqui.Worker):
        def close_soon(self) -> None:
            closing.append(asyncio.ensure_future(self.close()))

    closing: list[Any] = []
    worker = Once(queue, handle, redis_url=url)

    async def run() -> None:
        await worker.run()
        await asyncio.gather(*closing)

    asyncio.run(run())
    return seen


URL, JOBS = "{{ dag_run.conf['url'] }}", "{{ dag_run.conf['jobs'] | length }}"

with DAG("many", schedule=None, render_template_as_native_obj=True) as many:
    add = EnqueueOperator(
        task_id="add",
        queue_name=QUEUE,
        job_name="resize",
        jobs="{{ dag_run.conf['jobs'] }}",
        **HERE,
    )
    wait = JobSensor(task_id="wait", queue_name=QUEUE, job_ids=add.output, **HERE, **SOON)
    add >> work(URL, QUEUE, JOBS) >> wait

with DAG("forgetful", schedule=None) as forgetful:
    ForgetfulOperator(
        task_id="add",
        queue_name=QUEUE,
        job_name="charge",
        data={"run": "{{ run_id }}"},
        retries=1,
        retry_delay=timedelta(0),
        **HERE,
    )

with DAG("mapped", schedule=None) as mapped:
    each = EnqueueOperator.partial(
        task_id="add", queue_name=QUEUE, job_name="resize", **HERE
    ).expand(data=["a", "b", "c"])
    JobSensor(task_id="wait", queue_name=QUEUE, job_ids=each.output, **HERE, poke_interval=1,
              timeout=1)  # fmt: skip

with DAG("drained", schedule=None, render_template_as_native_obj=True) as drained:
    first = EnqueueOperator(task_id="add", queue_name=QUEUE, job_name="late", data=1, **HERE)
    done = work(URL, QUEUE, 1)
    first >> done >> QueueDrainedSensor(task_id="poked", queue_name=QUEUE, **HERE, **SOON)

with DAG("deferred", schedule=None, render_template_as_native_obj=True) as deferred:
    # Nobody but the worker outside of Airflow ends these.
    out = EnqueueOperator(task_id="add", queue_name=QUEUE, job_name="late", data=1, **HERE)
    of_job = JobSensor(
        task_id="job", queue_name=QUEUE, job_ids=out.output, deferrable=True, **HERE, **SOON
    )
    of_job >> QueueDrainedSensor(task_id="queue", queue_name=QUEUE, deferrable=True, **HERE, **SOON)

with DAG("locked", schedule=None) as locked:
    EnqueueOperator(task_id="add", queue_name=QUEUE, data="x", conn_id="locked")

with DAG("unknown", schedule=None) as unknown:
    JobSensor(task_id="wait", queue_name=QUEUE, job_ids="never-added", **HERE, **SOON)
