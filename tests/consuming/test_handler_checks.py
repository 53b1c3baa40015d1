"""What a worker's handlers may be is checked when it is made."""

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock, create_autospec

import pytest

from chasqui import Worker


def plain(job: Any) -> None:
    pass


def takes_nothing() -> None:
    pass


async def takes_two(to: str, subject: str) -> None:
    pass


async def takes_by_name(*, job: Any) -> None:
    pass


async def takes_more(job: Any, *, retry: bool) -> None:
    pass


def plain_generator(job: Any) -> Iterator[int]:
    yield 1


async def generator(job: Any) -> AsyncIterator[int]:
    yield 1


class Mailer:
    def send(self, job: Any, retry: bool = False) -> None:
        pass

    def hurry(self, job: Any, *, now: bool) -> None:
        pass

    async def __call__(self, job: Any) -> None:
        pass

    @staticmethod
    def nothing() -> None:
        pass


class TakesTwo:
    def __call__(self, to: str, subject: str) -> None:
        pass


@pytest.mark.parametrize(
    ("handler", "options", "told"),
    [
        ({}, {}, "handler is an empty mapping"),
        (None, {}, "handler must be callable"),
        ({"mail": 5}, {}, r"handler\['mail'\] must be callable"),
        (plain, {"default": plain}, "default is taken only where"),
        (plain, {"timeout_ms": -1}, "timeout_ms must be at least 1"),
        (plain, {"timeout_ms": {"mail": 0}}, r"timeout_ms\['mail'\] must be at least 1"),
        (plain, {"timeout_ms": True}, "timeout_ms must be an int"),
        (plain, {"processes": 0}, "processes must be at least 1"),
        (plain, {"threads": -3}, "threads must be at least 1"),
        (plain, {"threads": 0}, "threads must be at least 1"),
        ({"mail": plain}, {"batch": 5}, "handler cannot go by name with batch: pass one function"),
        ({}, {"batch": 5, "default": plain}, "handler cannot go by name with batch"),
        (plain, {"batch": 5, "timeout_ms": {"mail": 1}}, "timeout_ms cannot go by name with batch"),
        (plain, {"batch": 5, "processes": {"mail": 1}}, "processes cannot go by name with batch"),
        (lambda job: None, {"processes": 2}, "the handler is to run in processes"),
        ({5: plain}, {}, "handler goes by the names of jobs, which are str: got 5"),
        (plain, {"timeout_ms": {5: 5}}, "timeout_ms goes by the names of jobs, .*: got 5"),
        (
            {"sleep": plain, "b": plain},
            {"timeout_ms": {"slpp": 5}},
            "timeout_ms names 'slpp', for which handler has no function of its own: is it 'sleep'",
        ),
        ({"a": plain}, {"max_attempts": {"b": 2}}, "max_attempts names 'b', .* of its own$"),
        ({"a": plain}, {"backoff": {"b": 2}}, "backoff names 'b', .* of its own$"),
        (plain, {"backoff": {5: 5}}, "backoff goes by the names of jobs, .*: got 5"),
        (plain, {"max_attempts": {5: 5}}, "max_attempts goes by the names of jobs, .*: got 5"),
        (plain, {"batch": 5, "max_attempts": {"a": 1}}, "max_attempts cannot go by name with bat"),
        (plain, {"batch": 5, "backoff": {"a": 1}}, "backoff cannot go by name with batch: pass on"),
        ({"a": plain}, {"processes": {"b": 2}}, "processes names 'b', .* of its own$"),
        ({"a": plain}, {"processes": {"b": 2}, "default": plain}, "processes names 'b'"),
        (plain, {"processes": {"b": 2}}, "processes names 'b'"),
    ],
)
def test_what_cannot_work_is_refused(handler: Any, options: dict[str, Any], told: str):
    with pytest.raises((TypeError, ValueError), match=told):
        Worker("q", handler, **options)


def test_timeouts_may_be_for_names_that_the_default_runs():
    Worker("q", {"a": plain}, default=plain, timeout_ms={"b": 5})
    Worker("q", {}, default=plain, timeout_ms={"b": 5})
    Worker("q", plain, timeout_ms={"b": 5})


@pytest.mark.parametrize("option", ["max_attempts", "backoff"])
def test_so_may_what_else_goes_by_name(option: str):
    Worker("q", {"a": plain}, default=plain, **{option: {"b": 5}})
    Worker("q", plain, **{option: {"b": 5}})


def test_an_empty_mapping_with_a_default_will_do():
    Worker("q", {}, default=plain)


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        (takes_nothing, r"takes_nothing takes \(\)"),
        (takes_two, r"takes_two takes \(to: str, subject: str\)"),
        (takes_by_name, r"takes_by_name takes \(\*, job: Any\)"),
        (takes_more, r"takes_more takes \(job: Any, \*, retry: bool\)"),
        (Mailer().hurry, r"Mailer\.hurry takes \(job: Any, \*, now: bool\)"),
        (functools.partial(takes_two, "ada", "hello"), "partial takes"),
        (functools.partial(takes_more), "partial takes"),
        (lambda: None, "<lambda> takes"),
        (Mailer.send, r"Mailer\.send takes"),
        (Mailer().nothing, r"Mailer\.nothing takes"),
        (Mailer, "Mailer takes"),
        (TakesTwo(), "TakesTwo takes"),
        (functools.partial(plain, None), r"partial takes \(\)"),
        (create_autospec(takes_two), "takes_two takes"),
    ],
)
@pytest.mark.parametrize("batch", [None, 5])
def test_a_handler_that_cannot_be_called_with_a_job_is_refused(
    handler: Any, told: str, batch: int | None
):
    must = r" must accept one positional argument, the job \(with batch, the list of jobs\): .*"
    with pytest.raises(TypeError, match="^handler" + must + told):
        Worker("q", handler, batch=batch)
    if batch is None:
        with pytest.raises(TypeError, match=r"^handler\['mail'\]" + must + told):
            Worker("q", {"fine": plain, "mail": handler})
        with pytest.raises(TypeError, match="^default" + must + told):
            Worker("q", {"fine": plain}, default=handler)


@pytest.mark.parametrize("handler", [plain_generator, generator])
def test_a_generator_is_refused(handler: Any):
    """Its call would return at once, and none of it would have run."""
    with pytest.raises(TypeError, match=f"handler is a generator, .*: {handler.__name__}"):
        Worker("q", handler)


@pytest.mark.parametrize(
    "handler",
    [
        Mailer().send,
        Mailer(),
        functools.partial(Mailer.send, Mailer()),
        functools.partial(takes_two, "ada"),
        functools.partial(takes_two, subject="hello"),
        functools.partial(takes_more, retry=True),
        lambda *jobs: None,
        lambda job, more=None: None,
        print,
        dict.fromkeys,
        max,
        type,
        Mock(),
        AsyncMock(),
        create_autospec(plain),
    ],
)
def test_whatever_can_be_called_with_a_job_is_taken(handler: Any):
    Worker("q", handler)


def test_a_class_is_a_plain_function_whatever_its_instances_are():
    class Late:
        def __init__(self, job: Any) -> None: ...
        async def __call__(self) -> None: ...

    run, _ = Worker("q", Late)._handlers.find("mail")
    assert run is not Late
