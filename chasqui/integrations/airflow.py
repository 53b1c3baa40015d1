"""Airflow: an operator that adds jobs, and sensors that wait for jobs or for a queue.

The parameter is `queue_name`: in Airflow an operator's `queue` is where its task goes.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote, urlencode

from chasqui import Queue, sync
from chasqui.errors import JobFailedError
from chasqui.integrations.places import Standing, standing
from chasqui.managing.state import Counts
from chasqui.model.config import Endpoint
from chasqui.model.keys import Keys, check_job_id, check_queue_name
from chasqui.transport.blocking import BlockingConnection
from chasqui.transport.connection import Connection as AsyncConnection

try:
    from airflow.sdk import BaseOperator, BaseSensorOperator, Connection
    from airflow.triggers.base import BaseTrigger, TriggerEvent
except ImportError as error:
    raise ImportError(
        "chasqui.integrations.airflow needs Airflow 3.1 or newer: pip install 'chasqui[airflow]'"
    ) from error

__all__ = ["EnqueueOperator", "JobSensor", "QueueDrainedSensor", "QueueTrigger"]

#: How long the id of an added job stays taken: as long as Airflow lets a sensor wait.
UNIQUE_FOR: Final = timedelta(days=7)
_CLIENT: Final = "chasqui-airflow"
_SCHEMES: Final = ("redis", "rediss", "redis+sentinel", "redis+cluster")
_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class EnqueueOperator(BaseOperator):  # type: ignore[misc]
    """Add one job, `job_name` with `data`, or many, `jobs`: mappings with `data`, and their own
    `name` and options of `Queue.add_bulk` where they differ. Returns their ids.

    The DAG run, the task and the map index make a job's id. So whatever runs again, a retry after a
    lost reply or a cleared task, adds each job once within `unique_for`.
    """

    template_fields: Sequence[str] = ("queue_name", "job_name", "data", "jobs")
    ui_color = "#dce8d4"

    def __init__(
        self,
        *,
        queue_name: str,
        job_name: str = "",
        data: Any = None,
        jobs: Any = None,
        conn_id: str | None = None,
        url_env: str | None = None,
        unique_for: timedelta = UNIQUE_FOR,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if jobs is not None and data is not None:
            raise ValueError("data is for one job and jobs for many: give one of them")
        _check_source(conn_id, url_env)
        self.queue_name = queue_name
        self.job_name = job_name
        self.data = data
        self.jobs = jobs
        self.conn_id = conn_id
        self.url_env = url_env
        self.unique_for = unique_for

    def execute(self, context: Any) -> list[str]:
        jobs = [{"data": self.data}] if self.jobs is None else list(self.jobs)
        for i, job in enumerate(jobs):
            if not isinstance(job, Mapping):
                raise TypeError(f"jobs[{i}] must be a mapping, got {type(job).__name__}")
        place = _place(context["ti"])
        entries = [
            {"name": self.job_name, "job_id": _job_id(place, i), **job}
            for i, job in enumerate(jobs)
        ]
        url = _url(self.conn_id, self.url_env)
        with sync.Queue(self.queue_name, redis_url=url) as queue:
            added = queue.add_bulk(entries, unique_for=self.unique_for.total_seconds())
        new = sum(job.is_new for job in added)
        self.log.info(
            "queue %s: added %d jobs, %d were there already", self.queue_name, new, len(added) - new
        )
        return [job.id for job in added]


class _Sensor(BaseSensorOperator):  # type: ignore[misc]
    """What the sensors share: where the queue is, and how to wait in the triggerer."""

    template_fields: Sequence[str] = ("queue_name",)
    ui_color = "#d4e3e8"

    def __init__(
        self,
        *,
        queue_name: str,
        conn_id: str | None = None,
        url_env: str | None = None,
        deferrable: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        _check_source(conn_id, url_env)
        self.queue_name = queue_name
        self.conn_id = conn_id
        self.url_env = url_env
        self.deferrable = deferrable

    def wanted(self) -> list[str] | None:
        """The jobs to wait for; None: wait for the queue."""
        raise NotImplementedError

    def poke(self, context: Any) -> bool:
        url, job_ids = _url(self.conn_id, self.url_env), self.wanted()
        if job_ids is None:
            with sync.Queue(self.queue_name, redis_url=url) as queue:
                return _is_drained(queue.counts())
        keys = Keys(self.queue_name)
        connection = BlockingConnection(Endpoint.parse(url), key=keys.stream, client_name=_CLIENT)
        try:
            found = connection.run(standing(keys, job_ids))
        finally:
            connection.close()
        _raise_if_failed(self.queue_name, found)
        return found.left is None

    def execute(self, context: Any) -> Any:
        if not self.deferrable:
            return super().execute(context)
        if not self.poke(context):
            self.defer(
                trigger=QueueTrigger(
                    queue_name=self.queue_name,
                    job_ids=self.wanted(),
                    conn_id=self.conn_id,
                    url_env=self.url_env,
                    poll_interval=float(self.poke_interval),
                ),
                method_name="execute_complete",
                timeout=timedelta(seconds=float(self.timeout)),
            )
        return None

    def execute_complete(self, context: Any, event: Any = None) -> None:
        # Look once more: this raises if a job is in the dead-letter queue.
        if not self.poke(context):
            raise RuntimeError(f"queue {self.queue_name}: {event}")


class JobSensor(_Sensor):
    """Wait until jobs have ended. Raises JobFailedError as soon as one of them is in the
    dead-letter queue.

    `job_ids` is an id or a list of ids, such as an EnqueueOperator returns. A job that was
    cancelled, or deleted from the dead-letter queue, has ended too.
    """

    template_fields: Sequence[str] = ("queue_name", "job_ids")

    def __init__(self, *, job_ids: Any, **options: Any) -> None:
        super().__init__(**options)
        self.job_ids = job_ids

    def wanted(self) -> list[str]:
        return list(_flat(self.job_ids))


class QueueDrainedSensor(_Sensor):
    """Wait until a queue holds no waiting, running or delayed job. Dead jobs may stay."""

    def wanted(self) -> None:
        return None


class QueueTrigger(BaseTrigger):  # type: ignore[misc]
    """Waits on behalf of a sensor, in Airflow's triggerer."""

    def __init__(
        self,
        queue_name: str,
        job_ids: list[str] | None = None,
        conn_id: str | None = None,
        url_env: str | None = None,
        poll_interval: float = 60.0,
    ) -> None:
        super().__init__()
        self.queue_name = check_queue_name(queue_name)
        self.job_ids = job_ids
        self.conn_id = conn_id
        self.url_env = url_env
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = ("queue_name", "job_ids", "conn_id", "url_env", "poll_interval")
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        return path, {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        url = _env_url(self.url_env)
        if self.conn_id is not None:
            url = url_of(await Connection.async_get(self.conn_id))
        while True:
            if await self._is_over(url):
                yield TriggerEvent("over")
                return
            await asyncio.sleep(self.poll_interval)

    async def _is_over(self, url: str | None) -> bool:
        if self.job_ids is None:
            async with Queue(self.queue_name, redis_url=url) as queue:
                return _is_drained(await queue.counts())
        keys = Keys(self.queue_name)
        connection = AsyncConnection(Endpoint.parse(url), key=keys.stream, client_name=_CLIENT)
        try:
            found = await connection.run(standing(keys, self.job_ids))
        finally:
            await connection.close()
        return found.left is None


def url_of(connection: Any) -> str:
    """The URL of the server that an Airflow connection names. Its type may be `redis`, `rediss`,
    `redis+sentinel` or `redis+cluster`. Its schema, or `db` in its extra, is the database, or the
    service for Sentinel. The extra may hold `ssl` and TLS files."""
    extra = connection.extra_dejson
    scheme = (connection.conn_type or "redis").lower().replace("_", "+")
    if scheme not in _SCHEMES:
        raise ValueError(
            f"conn_id {connection.conn_id!r} is of type {scheme!r}: it must be one of "
            + ", ".join(_SCHEMES)
        )
    if scheme == "redis" and extra.get("ssl"):
        scheme = "rediss"
    login = quote(connection.login or "", safe="")
    if connection.password:
        login += ":" + quote(connection.password, safe="")
    port = f":{connection.port}" if connection.port else ""
    path = connection.schema or extra.get("db")
    files = {name: extra[name] for name in _TLS_FILES if extra.get(name)}
    return (
        f"{scheme}://{login + '@' if login else ''}{connection.host or ''}{port}"
        + (f"/{quote(str(path), safe='/')}" if path not in (None, "") else "")
        + (f"?{urlencode(files, quote_via=quote)}" if files else "")
    )


def _url(conn_id: str | None, url_env: str | None) -> str | None:
    return _env_url(url_env) if conn_id is None else url_of(Connection.get(conn_id))


def _env_url(variable: str | None) -> str | None:
    """The URL in an environment variable; None leaves the choice to chasqui."""
    if variable is None:
        return None
    url = os.environ.get(variable)
    if not url:
        raise ValueError(f"url_env: the environment variable {variable!r} is not set")
    return url


def _check_source(conn_id: str | None, url_env: str | None) -> None:
    if conn_id is not None and url_env is not None:
        raise ValueError("conn_id and url_env both name the server: give one of them")


def _place(instance: Any) -> str:
    parts = instance.dag_id, instance.run_id, instance.task_id, str(instance.map_index)
    return "/".join(parts[: 4 if instance.map_index >= 0 else 3])


def _job_id(place: str, i: int) -> str:
    """A readable id for a run's job; hashed if it is too long."""
    job_id = f"{place}/{i}"
    try:
        return check_job_id(job_id)
    except ValueError:
        return f"{hashlib.sha256(place.encode()).hexdigest()}/{i}"


def _flat(job_ids: Any) -> Iterable[str]:
    """The ids that a task returned, or that each of its mapped instances did."""
    if isinstance(job_ids, str):
        return [job_ids]
    if not isinstance(job_ids, Iterable) or isinstance(job_ids, Mapping):
        raise TypeError(f"job_ids must be an id or a list of them, got {type(job_ids).__name__}")
    return [one for part in job_ids for one in _flat(part)]


def _is_drained(counts: Counts) -> bool:
    return not (counts.waiting or counts.pending or counts.delayed)


def _raise_if_failed(queue: str, found: Standing) -> None:
    if found.unknown is not None:
        raise ValueError(
            f"job_ids: queue {queue!r} knows no job {found.unknown!r}: it was added to another "
            "queue, or its id is no longer kept"
        )
    if found.dead is not None:
        dead = found.dead
        raise JobFailedError(dead.job_id, dead.reason, dead.error or dead.detail)
