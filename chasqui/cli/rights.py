"""What a user may do, by the part that it plays; asked of the server itself, with ACL DRYRUN."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from chasqui import scripts
from chasqui._core.reply import ReplyError
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.transport.request import Effect, Plan, Script, commands

#: Parts, each with the scripts that it runs and the commands that it sends, in the ACL's words.
ROLES: Final[dict[str, tuple[tuple[Script, ...], str]]] = {
    "inspector": (
        (scripts.COUNTS,),
        "xrange xrevrange xread xpending xinfo|groups xinfo|stream xinfo|consumers "
        "zrange zscore hget get mget exists time",
    ),
    "producer": (
        (scripts.ADD, scripts.ADD_MIXED, scripts.CANCEL, scripts.RESCHEDULE),
        "mget",
    ),
    "worker": (
        (
            *(scripts.ACK, scripts.BURY, scripts.COMPLETE, scripts.FIRE, scripts.LEASE_RELEASE),
            *(scripts.LEASE_TAKE, scripts.LEAVE, scripts.PROMOTE, scripts.RECLAIM),
            *(scripts.RECOVER, scripts.RELEASE, scripts.RENEW, scripts.RETRY, scripts.SWEEP),
            scripts.TRIM,
        ),
        "xreadgroup xgroup|create xgroup|createconsumer xackdel xadd blpop getex exists "
        "zcard zcount zrangebyscore hmget time info",
    ),
    "operator": (
        (
            *(scripts.DELETE_DEAD, scripts.DRAIN, scripts.READER, scripts.REPLAY),
            *(scripts.UPSERT_REPEAT, scripts.REMOVE_REPEAT),
        ),
        "xdel set del unlink zrem scan",
    ),
}
_CALL = re.compile(rb"\bp?call\('(\w+)'(?:, '([A-Z]+)')?")
#: Commands whose second word is a command of its own.
_CONTAINERS = ("xinfo", "xgroup")


@dataclass(frozen=True, slots=True)
class Rights:
    """What came out."""

    user: str
    #: Per part the commands that the user may not use; None where the server does not tell.
    missing: dict[str, list[str]] | None


def rights(queue: str, *, lacks: Collection[str] = ()) -> Plan[Rights]:
    """What the user of this connection may do to a queue; `lacks` are commands that the server does
    not have."""
    keys = Keys(queue)
    whoami = yield commands(("ACL", "WHOAMI"), effect=Effect.READ, raises=False)
    user = whoami.decode(errors="replace") if isinstance(whoami, bytes) else "unknown"
    missing: dict[str, list[str]] = {}
    for role in ROLES:
        wanted = {name: sample(name, keys) for name in needed(role) if name not in lacks}
        calls = [("ACL", "DRYRUN", user, *command) for command in wanted.values()]
        answers = yield commands(*calls, effect=Effect.READ, raises=False)
        if any(isinstance(answer, ReplyError) for answer in answers):
            return Rights(user, None)
        missing[role] = [
            name for name, answer in zip(wanted, answers, strict=True) if answer != b"OK"
        ]
    return Rights(user, missing)


def needed(role: str) -> list[str]:
    """The commands of a part: its own, EVALSHA, and those inside its scripts."""
    run, sent = ROLES[role]
    found = {"evalsha", "eval", *sent.split()}
    for script in run:
        for command, word in _CALL.findall(script.source):
            name = command.decode().lower()
            found.add(f"{name}|{word.decode().lower()}" if name in _CONTAINERS else name)
    return sorted(found)


def sample(name: str, keys: Keys) -> tuple[Any, ...]:
    """A call of a command as we make it, on keys of the queue."""
    return (*name.split("|"), *_samples(keys)[name])


def _samples(keys: Keys) -> dict[str, tuple[Any, ...]]:
    stream, delayed, marker = keys.stream, keys.delayed, keys.unique("0")
    repeat, spec, group = keys.repeat, keys.repeat_spec("0"), DEFAULT_GROUP
    return {
        "blpop": (keys.wake, 1),
        "del": (marker,),
        "eval": ("return 1", 1, stream),
        "evalsha": ("0" * 40, 1, stream),
        "exists": (marker,),
        "expire": (marker, 1),
        "get": (keys.didx("0"),),
        "getex": (keys.promoter_lock,),
        "getbit": (keys.applied("0", 0), 0),
        "hdel": (spec, "retry"),
        "hget": (spec, "spec"),
        "hincrby": (spec, "fired", 1),
        "hmget": (spec, "spec"),
        "hset": (spec, "spec", ""),
        "info": ("memory",),
        "lpush": (keys.wake, "1"),
        "mget": (keys.result("0"),),
        "pttl": (keys.promoter_lock,),
        "scan": (0,),
        "set": (marker, "1"),
        "setbit": (keys.applied("0", 0), 0, 1),
        "time": (),
        "ttl": (marker,),
        "unlink": (stream,),
        "xack": (stream, group, "0-1"),
        "xackdel": (stream, group, "IDS", 1, "0-1"),
        "xadd": (stream, "*", "d", ""),
        "xclaim": (stream, group, "consumer", 0, "0-1"),
        "xdel": (stream, "0-1"),
        "xgroup|create": (stream, group, "0"),
        "xgroup|createconsumer": (stream, group, "consumer"),
        "xgroup|delconsumer": (stream, group, "consumer"),
        "xinfo|consumers": (stream, group),
        "xinfo|groups": (stream,),
        "xinfo|stream": (stream,),
        "xlen": (stream,),
        "xpending": (stream, group),
        "xrange": (stream, "-", "+"),
        "xread": ("STREAMS", keys.events, "0"),
        "xreadgroup": ("GROUP", group, "consumer", "STREAMS", stream, ">"),
        "xrevrange": (keys.dlq, "+", "-"),
        "xtrim": (keys.events, "MAXLEN", 1),
        "zadd": (delayed, 1, "member"),
        "zcard": (delayed,),
        "zcount": (repeat, "-inf", "+inf"),
        "zrange": (delayed, 0, 0),
        "zrangebyscore": (repeat, "-inf", "+inf"),
        "zrem": (delayed, "member"),
        "zscore": (delayed, "member"),
    }
