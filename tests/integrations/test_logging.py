"""Log records of a run have the fields of its job: for logging, and for structlog."""

import asyncio
import contextlib
import importlib
import logging
import logging.config
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from chasqui import Retry
from chasqui.integrations.logging import JobFields
from chasqui.integrations.structlog import add_job_fields
from tests.integrations.conftest import MakeApp, Working
from tests.servers import Server

log = logging.getLogger("shop.orders")


class Kept(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def fields(self, name: str = "shop.orders") -> list[tuple[Any, ...]]:
        names = ("msg", "job_id", "job_name", "attempt", "queue")
        return [
            tuple(vars(one)[field] for field in names) for one in self.records if one.name == name
        ]


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    handler.addFilter(JobFields())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


async def test_every_record_of_a_run_has_them(
    make_app: MakeApp, working: Working, queue_name: str, kept: Kept
) -> None:
    app = make_app()

    @app.task
    async def mail() -> None:
        log.info("on the loop")
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(log.info, "in a thread"))
        async with asyncio.TaskGroup() as group:
            group.create_task(logs("in a task"))

    async def logs(text: str) -> None:
        await asyncio.sleep(0)
        log.info(text)

    @app.task(attempts=2)
    def plain() -> None:
        log.info("plain")
        if len(kept.fields()) < 6:
            raise Retry(delay_ms=0)

    log.info("before")
    async with working(app):
        first = await mail.enqueue()
        await first.result()
        second = await plain.enqueue()
        await second.result()
    log.info("after")
    of_mail = (first.id, "mail", 1, queue_name)
    assert kept.fields() == [
        ("before", None, None, None, None),
        ("on the loop", *of_mail),
        ("in a thread", *of_mail),
        ("in a task", *of_mail),
        ("plain", second.id, "plain", 1, queue_name),
        ("plain", second.id, "plain", 2, queue_name),
        ("after", None, None, None, None),
    ]


async def test_jobs_that_run_at_once_have_their_own(
    make_app: MakeApp, working: Working, kept: Kept
) -> None:
    app = make_app()
    both = asyncio.Barrier(2)

    @app.task
    async def mail(text: str) -> None:
        await both.wait()
        log.info(text)

    async with working(app):
        jobs = [await mail.enqueue(text) for text in "ab"]
        for job in jobs:
            await job.result()
    assert {(text, job_id) for text, job_id, *_ in kept.fields()} == {
        ("a", jobs[0].id),
        ("b", jobs[1].id),
    }


async def test_what_a_record_says_itself_stays(
    make_app: MakeApp, working: Working, queue_name: str, kept: Kept
) -> None:
    app = make_app()

    @app.task
    async def mail() -> None:
        log.info("of another", extra={"job_id": "other"})
        log.info("of another queue", extra={"queue": "theirs"})

    async with working(app):
        job = await mail.enqueue()
        await job.result()
    assert kept.fields() == [
        ("of another", "other", None, None, None),
        ("of another queue", job.id, "mail", 1, "theirs"),
    ]


def test_a_filter_passes_what_its_name_says_and_fills_with_what_it_is_told() -> None:
    record = logging.makeLogRecord({"name": "shop.orders"})
    assert JobFields("shop", empty="-").filter(record)
    assert {vars(record)[one] for one in ("job_id", "job_name", "attempt", "queue")} == {"-"}
    assert not JobFields("bank").filter(record)


@pytest.mark.slow
async def test_processes_have_them_too(
    valkey_9: Server, queue_name: str, working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_QUEUE", queue_name)
    monkeypatch.setenv("TEST_URL", valkey_9.url)
    monkeypatch.delitem(sys.modules, "tests.integrations.processed", raising=False)
    module = importlib.import_module("tests.integrations.processed")
    async with working(module.app):
        job = await module.fields.enqueue()
        assert await job.result() == [job.id, "fields", 1, queue_name]


@contextlib.contextmanager
def configured(*processors: Any) -> Iterator[list[dict[str, Any]]]:
    """structlog with these processors, and what comes out of them."""
    events: list[dict[str, Any]] = []

    def keep(logger: Any, method: str, event: Any) -> Any:
        events.append(dict(event))
        raise structlog.DropEvent

    structlog.configure(processors=[*processors, keep])
    try:
        yield events
    finally:
        structlog.reset_defaults()


async def test_events_of_structlog_have_them(
    make_app: MakeApp, working: Working, queue_name: str
) -> None:
    app = make_app()
    slog = structlog.get_logger()

    @app.task
    async def mail() -> None:
        slog.info("mailed", to="a@b")
        await slog.ainfo("async")
        await asyncio.to_thread(slog.info, "in a thread", queue="theirs")
        slog.info("of another", job_id="other")

    with configured(add_job_fields) as events:
        slog.info("outside")
        async with working(app):
            job = await mail.enqueue()
            await job.result()
    fields = {"job_id": job.id, "job_name": "mail", "attempt": 1, "queue": queue_name}
    assert events == [
        {"event": "outside"},
        {"event": "mailed", "to": "a@b", **fields},
        {"event": "async", **fields},
        {"event": "in a thread", **fields, "queue": "theirs"},
        {"event": "of another", "job_id": "other"},
    ]
