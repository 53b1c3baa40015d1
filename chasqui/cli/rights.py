"""Which rights a user lacks for each role. The server itself says it, by ACL DRYRUN."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from chasqui._core.reply import ReplyError
from chasqui.model.keys import DEFAULT_GROUP, Keys
from chasqui.scripts.loading import load
from chasqui.transport.request import Effect, Plan, commands

#: For each role the scripts that it runs, by their files in scripts/lua, and the other commands
#: that it sends, by their ACL names.
ROLES: Final = {
    "inspector": (
        "counts",
        "xrange xrevrange xread xpending xinfo|groups xinfo|stream xinfo|consumers "
        "zrange zscore hget get mget exists time",
    ),
    "producer": ("add add_mixed cancel flow_begin reschedule", "hexists mget"),
    "worker": (
        "ack bury complete fire flow flow_bury flow_step join lease_release lease_take leave owned "
        "promote reclaim recover release renew retry sweep trim",
        "xreadgroup xgroup|create xgroup|createconsumer xackdel xadd blpop getex exists "
        "zcard zcount zrangebyscore hmget time info",
    ),
    "operator": (
        "delete_dead drain reader replay upsert_repeat remove_repeat",
        "xdel set del unlink zrem scan",
    ),
}
_CALL = re.compile(rb"\bp?call\('(\w+)'(?:, '([A-Z]+)')?")
#: Commands that an ACL names together with their second word.
_CONTAINERS = ("xinfo", "xgroup")


@dataclass(frozen=True, slots=True)
class Rights:
    """The user of a connection, and what it may not do."""

    user: str
    #: For each role the commands that the user may not send; None if the server does not say.
    missing: dict[str, list[str]] | None


def rights(queue: str, *, lacks: Collection[str] = ()) -> Plan[Rights]:
    """The rights of this connection's user to a queue. `lacks` names commands that the server does
    not have."""
    keys = Keys(queue)
    whoami = yield commands(("ACL", "WHOAMI"), effect=Effect.READ, raises=False)
    user = whoami.decode(errors="replace") if isinstance(whoami, bytes) else "unknown"
    missing: dict[str, list[str]] = {}
    for role in ROLES:
        wanted = {name: sample(name, keys) for name in needed(role) if name not in lacks}
        calls = [("ACL", "DRYRUN", user, *command) for command in wanted.values()]
        replies = yield commands(*calls, effect=Effect.READ, raises=False)
        if any(isinstance(reply, ReplyError) for reply in replies):
            return Rights(user, None)
        missing[role] = [one for one, reply in zip(wanted, replies, strict=True) if reply != b"OK"]
    return Rights(user, missing)


def needed(role: str) -> list[str]:
    """The commands of a role: those that it sends, and those inside its scripts."""
    scripts, sent = ROLES[role]
    found = {"evalsha", "eval", *sent.split()}
    for script in scripts.split():
        for command, word in _CALL.findall(load(script).source):
            name = command.decode().lower()
            found.add(f"{name}|{word.decode().lower()}" if name in _CONTAINERS else name)
    return sorted(found)


def sample(name: str, keys: Keys) -> tuple[Any, ...]:
    """A call of a command such as we make it, with keys of the queue."""
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
        "hexists": (keys.flow("0"), "begun"),
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
