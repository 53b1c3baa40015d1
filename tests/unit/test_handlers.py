"""What a worker's handlers may be is checked when it is made."""

from typing import Any

import pytest

from chasqui import Worker


def plain(job: Any) -> None:
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
        ({"mail": plain}, {"batch": 5}, "handler cannot go by name with batch"),
        ({}, {"batch": 5, "default": plain}, "handler cannot go by name with batch"),
        (plain, {"batch": 5, "timeout_ms": {"mail": 1}}, "timeout_ms cannot go by name with batch"),
        (plain, {"batch": 5, "processes": {"mail": 1}}, "processes cannot go by name with batch"),
        (lambda job: None, {"processes": 2}, "the handler is to run in processes"),
    ],
)
def test_what_cannot_work_is_refused(handler: Any, options: dict[str, Any], told: str):
    with pytest.raises((TypeError, ValueError), match=told):
        Worker("q", handler, **options)


def test_an_empty_mapping_with_a_default_will_do():
    Worker("q", {}, default=plain)
