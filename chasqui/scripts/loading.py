"""The Lua transitions in lua/, loaded once; each file's header says what its script does."""

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import evalsha
from chasqui._core.reply import Builder
from chasqui.transport.request import Effect, Request, Script


def load(name: str, *before: str) -> Script:
    """The script of lua/<name>.lua, behind the functions of those that it needs."""
    folder = files("chasqui").joinpath("lua")
    source = b"".join(folder.joinpath(f"{part}.lua").read_bytes() for part in (*before, name))
    # The name Redis gives a script; nothing is protected by it.
    sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
    return Script(name, source, sha)


ACK: Final = load("ack", "owned")
ADD: Final = load("add")
ADD_MIXED: Final = load("add_mixed")
BURY: Final = load("bury", "owned")
CANCEL: Final = load("cancel")
COMPLETE: Final = load("complete", "owned")
COUNTS: Final = load("counts")
DELETE_DEAD: Final = load("delete_dead")
DRAIN: Final = load("drain")
FIRE: Final = load("fire")
JOIN: Final = load("join")
LEASE_RELEASE: Final = load("lease_release")
LEASE_TAKE: Final = load("lease_take")
LEAVE: Final = load("leave")
PROMOTE: Final = load("promote", "envelope")
READER: Final = load("reader")
RECLAIM: Final = load("reclaim")
RECOVER: Final = load("recover")
RELEASE: Final = load("release", "owned")
REMOVE_REPEAT: Final = load("remove_repeat")
RENEW: Final = load("renew", "owned")
REPLAY: Final = load("replay")
RESCHEDULE: Final = load("reschedule")
RETRY: Final = load("retry", "owned")
SWEEP: Final = load("sweep")
TRIM: Final = load("trim")
UPSERT_REPEAT: Final = load("upsert_repeat")


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
