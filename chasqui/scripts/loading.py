"""Loads Lua transitions from lua/ and makes the requests that run them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import evalsha
from chasqui._core.reply import Builder
from chasqui.transport.request import Effect, Request, Script

#: How long the server keeps the reply to a call for a repeat of it: a key each, so not for longer.
REPLY_TTL_S: Final = 600
_LUA: Final = Path(__file__).with_name("lua")


def load(name: str, *before: str) -> Script:
    """The script of lua/<name>.lua, behind the functions of those that it needs."""
    source = b"".join((_LUA / f"{part}.lua").read_bytes() for part in (*before, name))
    # The name Redis gives a script; nothing is protected by it.
    sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
    return Script(name, source, sha)


def call(
    script: Script,
    keys: Sequence[bytes],
    arguments: Sequence[bytes | str | int | float],
    effect: Effect,
    *,
    builder: Builder | None = None,
    **options: Any,
) -> Request:
    """The request that runs a script."""
    buffer = CommandBuffer()
    evalsha(buffer, script.sha, keys, arguments)
    return Request(bytes(buffer), effect, script=script, builder=builder, **options)


def or_empty(value: int | None) -> int | str:
    """How a script takes a number that may be missing."""
    return "" if value is None else value
