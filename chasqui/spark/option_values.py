"""Parsers of option values: each takes text, and raises ValueError that says what it must be."""

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from chasqui.model.config import Endpoint
from chasqui.model.keys import check_queue_name

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def text(value: str) -> str | None:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def label(value: str) -> str | None:
    """A name that becomes part of a key."""
    text(value)
    if len(value) > 200 or not value.isprintable():
        raise ValueError("must be at most 200 characters, without line breaks and the like")
    return value


def flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(f"must be true or false, got {value!r}")
    return value.lower() == "true"


def number(least: int, most: int = 2**53) -> Callable[[str], Any]:
    def parse(value: str) -> int:
        if not re.fullmatch(r"\d{1,18}", value) or not least <= int(value) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, got {value!r}")
        return int(value)

    return parse


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        for choice in choices:
            if choice.lower() == value.lower():
                return choice
        raise ValueError(f"must be one of {', '.join(choices)}, got {value!r}")

    return parse


def seconds(value: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", value)
    if found is None:
        raise ValueError(f"must be a time such as 500ms, 10s, 5m, 2h or 1d, got {value!r}")
    return float(found[1]) * _UNITS_S[found[2]]


def share(value: str) -> float:
    if not re.fullmatch(r"\d(\.\d{1,6})?", value) or not 0.01 <= float(value) <= 1:
        raise ValueError(f"must be from 0.01 to 1, got {value!r}")
    return float(value)


def names(value: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not found:
        raise ValueError("must name at least one")
    return found


def queue_names(value: str) -> tuple[str, ...]:
    return tuple(check_queue_name(name) for name in names(value))


def pattern(value: str) -> str | None:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    return value


def offsets(value: str) -> str:
    """`earliest`, `latest`, or a JSON object of queue to stream id."""
    if value.lower() in ("earliest", "latest"):
        return value.lower()
    try:
        given = json.loads(value)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not all(
        isinstance(one, str) and re.fullmatch(r"\d{1,20}(-\d{1,20})?", one)
        for one in given.values()
    ):
        raise ValueError(
            f'must be earliest, latest or JSON such as {{"orders": "1794-0"}}, got {value!r}'
        )
    return value


def url(value: str) -> str | None:
    endpoint = Endpoint.parse(value)
    has_login = endpoint.sentinel_username or endpoint.sentinel_password
    if has_login or "@" in urlsplit(value).netloc:
        raise ValueError(
            "must hold no user or password, because Spark writes options into plans and logs: "
            "put the URL into an environment variable and name that one with urlEnv"
        )
    if value.startswith("embedded"):
        raise ValueError("must name a server that executors can reach, and got embedded://")
    return value
