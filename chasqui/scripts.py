"""The Lua transitions in lua/, loaded once; each file's header says what its script does."""

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

from chasqui._core.buffer import CommandBuffer
from chasqui._core.command import evalsha
from chasqui._core.reply import Builder
from chasqui.request import Effect, Request, Script


def _load(name: str) -> Script:
    source = files("chasqui").joinpath("lua", f"{name}.lua").read_bytes()
    # The name Redis gives a script; nothing is protected by it.
    sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
    return Script(name, source, sha)


ACK: Final = _load("ack")
ADD: Final = _load("add")
ADD_MIXED: Final = _load("add_mixed")
BURY: Final = _load("bury")
CANCEL: Final = _load("cancel")
COMPLETE: Final = _load("complete")
COUNTS: Final = _load("counts")
FIRE: Final = _load("fire")
LEASE_RELEASE: Final = _load("lease_release")
LEASE_TAKE: Final = _load("lease_take")
PROMOTE: Final = _load("promote")
RECLAIM: Final = _load("reclaim")
RELEASE: Final = _load("release")
REMOVE_REPEAT: Final = _load("remove_repeat")
RENEW: Final = _load("renew")
REPLAY: Final = _load("replay")
RESCHEDULE: Final = _load("reschedule")
RETRY: Final = _load("retry")
UPSERT_REPEAT: Final = _load("upsert_repeat")


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
