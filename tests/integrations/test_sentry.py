"""Errors and traces of jobs, as Sentry's SDK would send them."""

import asyncio
import json
import logging
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from chasqui import JobFailedError, LeaseLostError, Retry, UnrecoverableError
from chasqui.integrations.sentry import SentryHook
from tests.integrations.conftest import MakeApp, Working

SECRET = "4111-1111"


class Sent(Transport):
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.items += [item.payload.json for item in envelope.items if item.payload.json]

    @property
    def errors(self) -> list[str]:
        """The type and text of each error that was sent."""
        return [
            f"{last['type']}: {last['value']}"
            for item in self.items
            if "exception" in item
            for last in [item["exception"]["values"][-1]]
        ]

    @property
    def transactions(self) -> list[dict[str, Any]]:
        return [item for item in self.items if item.get("type") == "transaction"]


@pytest.fixture
def sent() -> Iterator[Sent]:
    yield from initialized()


@pytest.fixture
def traced() -> Iterator[Sent]:
    yield from initialized(traces_sample_rate=1.0)


def initialized(**options: Any) -> Iterator[Sent]:
    transport = Sent()
    with sentry_sdk.isolation_scope():
        sentry_sdk.init(
            dsn="https://key@sentry.invalid/1",
            transport=transport,
            auto_enabling_integrations=False,
            **options,
        )
        yield transport
        sentry_sdk.get_global_scope().set_client(None)


async def fails(job: Any) -> None:
    with pytest.raises(JobFailedError):
        await job.result()


async def test_an_error_that_ends_its_job_is_sent_once_with_the_job_and_without_its_data(
    make_app: MakeApp, working: Working, queue_name: str, sent: Sent
) -> None:
    app = make_app(around=[SentryHook()])

    @app.task(attempts=2, backoff=0)
    async def charge(card: str) -> None:
        logging.getLogger("shop").warning("charging")
        digits = card  # a local variable
        raise ValueError(f"{len(digits)} digits are refused")

    async with working(app):
        job = await charge.enqueue(SECRET)
        await fails(job)
    assert sent.errors == ["ValueError: 9 digits are refused"], "not the first attempt"
    (event,) = sent.items
    assert event["tags"] == {"job_id": job.id, "job_name": "charge", "queue": queue_name}
    facts = event["contexts"]["job"]
    assert facts.pop("created_at_ms") > 0
    assert facts == {
        "id": job.id,
        "name": "charge",
        "queue": queue_name,
        "attempt": 2,
        "max_attempts": 2,
    }
    assert event["transaction"] == "charge"
    assert [one["message"] for one in event["breadcrumbs"]["values"]] == ["charging"]
    assert SECRET not in json.dumps(event)


async def test_data_and_variables_are_sent_if_asked_for(
    make_app: MakeApp, working: Working, sent: Sent
) -> None:
    app = make_app(around=[SentryHook(send_data=True)])

    @app.task(attempts=1)
    def charge(card: str) -> None:
        raise ValueError("refused")

    async with working(app):
        await fails(await charge.enqueue(SECRET))
    (event,) = sent.items
    assert event["contexts"]["job"]["data"] == {"card": SECRET}
    frame = event["exception"]["values"][-1]["stacktrace"]["frames"][-1]
    assert frame["vars"]["card"] == f"'{SECRET}'"


@pytest.mark.parametrize("every_attempt", [False, True], ids=["last", "every"])
async def test_which_errors_are_sent(
    make_app: MakeApp, working: Working, sent: Sent, every_attempt: bool
) -> None:
    app = make_app(around=[SentryHook(every_attempt=every_attempt)])
    left = {"heals": 1, "asks": 1, "lost": 1}

    @app.task(attempts=3, backoff=0)
    async def run(name: str) -> str:
        if left.get(name):
            left[name] -= 1
            match name:
                case "heals":
                    raise ValueError("heals")
                case "asks":
                    raise Retry("not yet", delay_ms=0)
                case "lost":
                    raise LeaseLostError("others have it")
        if name == "asks for ever":
            raise Retry("never", delay_ms=0)
        if name == "useless":
            raise UnrecoverableError("useless")
        return name

    @app.task
    async def wrong() -> Decimal:
        return 5  # type: ignore[return-value]

    async with working(app):
        for name in ("heals", "asks", "lost"):
            assert await (await run.enqueue(name)).result() == name
        for name in ("asks for ever", "useless"):
            await fails(await run.enqueue(name))
        await fails(await wrong.enqueue())
        # Written by another program: the data is not what the task takes.
        await fails(await app.queue().add("run", {"name": 5}))
    first = ["ValueError: heals"] if every_attempt else []
    assert sent.errors == [
        *first,
        "Retry: never",
        "UnrecoverableError: useless",
        "ResultError: result must be a Decimal, got int",
        "TaskDataError: task 'run': name must be a str, got int",
    ]


async def test_a_timeout_is_an_error(make_app: MakeApp, working: Working, sent: Sent) -> None:
    app = make_app(around=[SentryHook()])

    @app.task(attempts=1, timeout=0.05)
    async def hang() -> None:
        await asyncio.sleep(1000)

    async with working(app):
        await fails(await hang.enqueue())
    assert sent.errors == ["TimeoutError: the handler took longer than 0.05 s"]


async def test_what_the_worker_logs_beside_the_hook_is_sent_without_variables(
    make_app: MakeApp, working: Working, sent: Sent
) -> None:
    app = make_app(around=[SentryHook()])

    @app.task
    async def big(text: str) -> object:
        return {text: object()}  # cannot be stored, which no hook sees

    async with working(app):
        await fails(await big.enqueue(SECRET))
        await fails(await app.queue().add("nobody", SECRET))
    assert len(sent.items) == 2
    assert "dead-letter queue" in json.dumps(sent.items)
    assert '"vars"' not in json.dumps(sent.items)


async def test_a_run_is_a_transaction_where_tracing_is_on(
    make_app: MakeApp, working: Working, queue_name: str, traced: Sent
) -> None:
    app = make_app(around=[SentryHook()])

    @app.task(attempts=1)
    async def charge(amount: int) -> int:
        if amount < 0:
            raise ValueError("less than nothing")
        with sentry_sdk.start_span(op="bank", name="ask"):
            return amount

    async with working(app):
        good = await charge.enqueue(5)
        await good.result()
        bad = await charge.enqueue(-1)
        await fails(bad)
    first, second = traced.transactions
    assert first["transaction"] == second["transaction"] == "charge"
    trace = first["contexts"]["trace"]
    assert (trace["op"], trace["status"]) == ("queue.process", "ok")
    assert trace["data"]["messaging.message.id"] == good.id
    assert trace["data"]["messaging.destination.name"] == queue_name
    assert trace["data"]["messaging.message.retry.count"] == 0
    assert [span["op"] for span in first["spans"]] == ["bank"]
    assert second["contexts"]["trace"]["status"] == "internal_error"
    (error,) = [item for item in traced.items if "exception" in item]
    assert error["contexts"]["trace"]["trace_id"] == second["contexts"]["trace"]["trace_id"]
    assert trace["trace_id"] != second["contexts"]["trace"]["trace_id"]


async def test_scopes_of_runs_are_apart(make_app: MakeApp, working: Working, sent: Sent) -> None:
    app = make_app(around=[SentryHook()])

    @app.task(attempts=1)
    async def charge(customer: str) -> None:
        if customer:
            sentry_sdk.set_tag("customer", customer)
        raise ValueError("refused")

    async with working(app):
        await fails(await charge.enqueue("ann"))
        await fails(await charge.enqueue(""))
    assert [event["tags"].get("customer") for event in sent.items] == ["ann", None]
