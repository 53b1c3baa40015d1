"""`Jobs`: what a test asks about the jobs of its program, and does with them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from chasqui import App, Task, sync
from chasqui.testing.apps import run_apart, taken_to
from chasqui.testing.clock import Moves
from chasqui.testing.drain import Drain
from chasqui.testing.drained import Drained
from chasqui.testing.enqueued import Enqueued, Expected, enqueued, table
from chasqui.testing.one_run import run_once
from chasqui.testing.server import ServerOfTests, shared

P = ParamSpec("P")
R = TypeVar("R")

#: The object that is open, if there is one: a process has one set of apps.
_open: list["Jobs"] = []


class Jobs:
    """The jobs of one test. The fixture `jobs` gives it, and so does `chasqui.testing.jobs()`."""

    def __init__(self, server: ServerOfTests) -> None:
        self._server = server
        self._moves = Moves()
        self._is_open = True

    @property
    def url(self) -> str:
        """The server of the test, for what does not ask CHASQUI_URL."""
        return self._server.url

    # ── Running ─────────────────────────────────────────────────────────────────────────────────

    async def drain(
        self,
        *,
        until: timedelta | None = None,
        raises: bool = True,
        app: App[Any] | None = None,
    ) -> Drained:
        """Run everything to its end, delayed jobs and retries too, in the order in which they are
        due, and without waiting for it.

        `until` is how far the clock may move: jobs that are due later stay delayed. With `raises`
        the first exception of a handler ends the drain and is raised; without it, failed jobs are
        retried and buried as in production. `app` says whose workers run the jobs, where several
        apps have tasks on one queue. Repeatable tasks do not fire: use `fire`.
        """
        self._check("drain")
        _check_until(until)
        async with Drain(self._server, self._moves, until=until, raises=raises, app=app) as drain:
            return await drain.run()

    def drain_sync(
        self,
        *,
        until: timedelta | None = None,
        raises: bool = True,
        app: App[Any] | None = None,
    ) -> Drained:
        """The same for tests that are plain functions."""
        return run_apart(self.drain(until=until, raises=raises, app=app), "drain")

    async def run(self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a task once, without a queue; what it returns, as `job.result()` would give it.

        The arguments are encoded and decoded as on the way to a worker; context, hooks, timeout and
        `current_job` are those of a worker.
        """
        self._check("run")
        result: R = await run_once(task, args, kwargs)
        return result

    def run_sync(self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for tests that are plain functions."""
        return run_apart(self.run(task, *args, **kwargs), "run")

    def fire(self, task: Task[Any, Any]) -> None:
        """Add one job of a task that has `every` or `cron`, as if its time had come."""
        if task.options.repeat is None:
            raise ValueError(f"task {task.name!r} has neither every= nor cron=: use enqueue")
        with sync.Queue(task.options.queue, redis_url=self._server.url) as queue:
            queue.add(task.name, {})

    # ── Asking ──────────────────────────────────────────────────────────────────────────────────

    def all_enqueued(self, task: Task[Any, Any] | None = None) -> list[Enqueued]:
        """The jobs that wait or are delayed, or those of one task: first those that wait."""
        found = enqueued(self._server, self._moves, self._server.queues())
        if task is None:
            return found
        expected = Expected(task, {})
        return [job for job in found if expected.fits(job)]

    def assert_enqueued(self, task: Task[Any, Any], /, **expected: Any) -> Enqueued:
        """Fail unless a job of the task with these arguments waits or is delayed; the first one.

        Also `delay=` (a timedelta, to a second), `at=` (a datetime), `queue=` and `job_id=`, where
        the task has no parameter of that name.
        """
        wanted = Expected(task, expected)
        found = self.all_enqueued()
        for job in found:
            if wanted.fits(job):
                return job
        raise AssertionError(f"no job of {wanted} was enqueued. {table(found)}")

    def refute_enqueued(self, task: Task[Any, Any], /, **expected: Any) -> None:
        """Fail if such a job waits or is delayed."""
        wanted = Expected(task, expected)
        found = [job for job in self.all_enqueued() if wanted.fits(job)]
        if found:
            raise AssertionError(f"a job of {wanted} was enqueued. {table(found)}")

    def _check(self, what: str) -> None:
        if not self._is_open:
            raise RuntimeError(f"jobs.{what} was called after the end of its test")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                f"jobs.{what} needs an event loop of asyncio, and none runs here (chasqui does not "
                f"run on trio): use jobs.{what}_sync"
            ) from None


def _check_until(until: object) -> None:
    if until is not None and not isinstance(until, timedelta):
        raise TypeError(f"until must be a timedelta, got {type(until).__name__}")


@contextmanager
def opened() -> Iterator[Jobs]:
    """The jobs of a test, while the block runs."""
    if _open:
        raise RuntimeError("this test has `jobs` already: take that, there is one in a process")
    server = shared()
    server.begin()
    jobs = Jobs(server)
    _open.append(jobs)
    try:
        with taken_to(server.url):
            try:
                yield jobs
            finally:
                jobs._is_open = False
    finally:
        _open.remove(jobs)
        server.end()
