"""`chasqui doctor`: what a server can do, which settings could lose jobs, what the user may do."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from chasqui._core.reply import ReplyError
from chasqui.cli.options import AsJson, RedisUrl
from chasqui.cli.output import show_all
from chasqui.cli.rights import Rights, rights
from chasqui.cli.run import on_server
from chasqui.errors import ChasquiError
from chasqui.managing import retention
from chasqui.managing.retention import Log, LogReader
from chasqui.model.keys import Keys
from chasqui.running import target
from chasqui.tasks.app import App
from chasqui.tasks.serving import SCHEDULE_PREFIX, schedule_key
from chasqui.timed import repeatables
from chasqui.transport.connection import Connection
from chasqui.transport.request import Effect, commands
from chasqui.transport.server import ServerProfile, time_us

#: Pings sent to measure the latency.
_PINGS = 50
_SLOW_MS = 20.0
_MAX_SKEW_MS = 1000
#: From this share on a server is short of memory, and a reader holds almost all that it may.
_FULL = 0.9
_MOST_SPECS = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the server. It is a risk if jobs could be lost or the queue could stop."""

    what: str
    found: str
    is_risk: bool = False
    advice: str = ""


def doctor(
    queue: Annotated[
        str,
        typer.Option(metavar="NAME", help="The queue whose readers and rights to check."),
    ] = "chasqui",
    app: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:APP", help="Find schedules that no task of this app has any more."
        ),
    ] = None,
    redis_url: RedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Say what a server can do, which of its settings could lose jobs, and what the user may do.

    This changes nothing. Exit code 1 if there is a risk.

    Example: chasqui doctor --redis-url rediss://queue.example.com:6380
    """
    keys = {} if app is None else schedule_keys(app)
    findings = on_server(
        redis_url, lambda it: _examine(it, queue, keys), queue=queue, is_reader=True
    )
    rows = [
        ("RISK" if finding.is_risk else "ok", finding.what, finding.found, finding.advice)
        for finding in findings
    ]
    show_all(("verdict", "what", "found", "advice"), rows, as_json=as_json, nothing="")
    if any(finding.is_risk for finding in findings):
        raise typer.Exit(1)


def schedule_keys(path: str) -> dict[str, set[str]]:
    """The keys of the schedules that an app has in code, for each of its queues."""
    found = target.find(path)
    if not isinstance(found, App):
        raise target.TargetError(f"{path} is no App, but a {type(found).__name__}")
    found.worker_group()  # imports all of its modules
    keys: dict[str, set[str]] = {task.options.queue: set() for task in found.tasks}
    for task in found.tasks:
        if task.options.repeat is not None:
            keys[task.options.queue].add(schedule_key(task))
    return keys


async def _examine(connection: Connection, queue: str, keys: dict[str, set[str]]) -> list[Finding]:
    profile = await connection.connect()
    info, settings = await _facts(connection)
    lacks = () if profile.xackdel else ("xackdel",)
    return [
        _version(profile),
        _capabilities(profile),
        *(_settings(profile, info, settings) if info else [_REFUSED]),
        *await _clock_and_latency(connection),
        *await _readers(connection, queue),
        *[one for name, known in keys.items() for one in await _schedules(connection, name, known)],
        *_rights(await connection.run(rights(queue, lacks=lacks))),
    ]


_REFUSED = Finding(
    "settings",
    "INFO is refused",
    advice="run doctor as a user with the right to INFO: it shows the risks",
)


def _settings(
    profile: ServerProfile, info: dict[str, str], settings: dict[str, str]
) -> Iterator[Finding]:
    yield from _persistence(profile, info, settings)
    if "stream-idmp-maxsize" in settings:
        yield _idmp(settings)
    yield from _memory(info)
    yield from _replication(info)


async def _facts(connection: Connection) -> tuple[dict[str, str], dict[str, str]]:
    """INFO, and settings that it does not have; empty if the user may not see them."""
    names = (
        *("appendfsync", "save", "no-appendfsync-on-rewrite", "min-replicas-to-write"),
        *("stream-idmp-maxsize", "stream-idmp-duration"),
    )
    request = commands(
        ("INFO",), *(("CONFIG", "GET", name) for name in names), effect=Effect.READ, raises=False
    )
    info, *replies = await connection.submit(request)
    text = info.decode(errors="replace") if isinstance(info, bytes) else ""
    settings = {name: _setting(reply) for name, reply in zip(names, replies, strict=True)}
    return (
        dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line),
        {name: value for name, value in settings.items() if value is not None},
    )


def _setting(reply: Any) -> str | None:
    """The value in a reply to CONFIG GET of one name, in RESP3 or RESP2."""
    values = list(reply.values()) if isinstance(reply, dict) else reply
    if not isinstance(values, list) or not values or not isinstance(values[-1], bytes):
        return None
    return values[-1].decode(errors="replace")


def _version(profile: ServerProfile) -> Finding:
    return Finding("version", str(profile), bool(profile.advice), profile.advice)


def _capabilities(profile: ServerProfile) -> Finding:
    can = {"XACKDEL": profile.xackdel, "CLAIM": profile.claim, "WAITAOF": profile.waitaof}
    return Finding(
        "commands",
        ", ".join(name for name, there in can.items() if there) or "none of the newer ones",
        advice="" if all(can.values()) else "scripts do the rest, with the same guarantees",
    )


def _idmp(settings: dict[str, str]) -> Finding:
    """How long the server recognises a repeated XADD of chasquimq."""
    ids, seconds = settings["stream-idmp-maxsize"], settings.get("stream-idmp-duration", "unknown")
    return Finding(
        "IDMP window",
        f"{ids} ids a producer, {seconds} s",
        advice="chasqui adds exactly once without it; chasquimq may add a bulk twice if the bulk "
        "is longer",
    )


def _persistence(
    profile: ServerProfile, info: dict[str, str], settings: dict[str, str]
) -> Iterator[Finding]:
    if info.get("aof_enabled") == "1":
        fsync = settings.get("appendfsync", "unknown")
        needs = "needs always here" if profile.confirms_early else "waits for the disk"
        yield Finding(
            "persistence",
            f"append-only file, appendfsync {fsync}",
            fsync == "no",
            {
                "everysec": f'a crash of the machine loses up to a second; durable="disk" {needs}',
                "no": "a crash of the machine loses what is not yet written: use everysec",
            }.get(fsync, ""),
        )
        if fsync != "no" and settings.get("no-appendfsync-on-rewrite") == "yes":
            advice = "while the file is rewritten a crash loses more: set it to no"
            yield Finding("persistence", "no-appendfsync-on-rewrite yes", True, advice)
    else:
        snapshots = settings.get("save", "")
        found = f"snapshots only ({snapshots})" if snapshots else "none"
        lost = "all jobs since the last snapshot" if snapshots else "all jobs"
        yield Finding("persistence", found, True, f"a restart loses {lost}: set appendonly yes")
    for name in ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status"):
        if info.get(name, "ok") != "ok":
            yield Finding("persistence", f"{name} {info[name]}", True, "see the server's log")


def _memory(info: dict[str, str]) -> Iterator[Finding]:
    policy, limit = info.get("maxmemory_policy", "unknown"), int(info.get("maxmemory", "0") or 0)
    is_risk = policy not in ("noeviction", "unknown")
    yield Finding(
        "eviction",
        f"maxmemory-policy {policy}",
        is_risk,
        "a full server drops jobs: set noeviction" if is_risk else "",
    )
    used = int(info.get("used_memory", "0") or 0)
    is_short = bool(limit) and used > limit * _FULL
    yield Finding(
        "memory",
        f"{used / 2**20:,.0f} MB used of {f'{limit / 2**20:,.0f} MB' if limit else 'no limit'}",
        is_short,
        "adds are refused when it is full" if is_short else "",
    )


def _replication(info: dict[str, str]) -> Iterator[Finding]:
    role = info.get("role", "unknown")
    if role == "slave":
        yield Finding("replication", "a replica", True, "queues are written to: name the primary")
    elif role == "master":
        replicas = int(info.get("connected_slaves", "0") or 0)
        advice = "a failover may lose the last adds; durable='replica' waits" if replicas else ""
        yield Finding("replication", f"primary, replicas: {replicas}", advice=advice)


async def _clock_and_latency(connection: Connection) -> list[Finding]:
    times_ms = []
    for _ in range(_PINGS):
        started_s = time.perf_counter()
        # A refusal takes just as long.
        await connection.execute("PING", effect=Effect.READ, raises=False)
        times_ms.append((time.perf_counter() - started_s) * 1000)
    median_ms = statistics.median(times_ms)
    latency = Finding(
        "latency",
        f"median {median_ms:.2f} ms, worst of {_PINGS} {max(times_ms):.2f} ms",
        advice="add in bulk, or concurrently" if median_ms > _SLOW_MS else "",
    )
    before_s = time.time()
    reply = await connection.execute("TIME", effect=Effect.READ, raises=False)
    if isinstance(reply, ReplyError):
        return [latency]
    here_s = (before_s + time.time()) / 2
    skew_ms = round(time_us(reply) / 1000 - here_s * 1000)
    is_skewed = abs(skew_ms) > _MAX_SKEW_MS
    return [
        latency,
        Finding(
            "clock",
            f"{abs(skew_ms)} ms {'ahead of' if skew_ms > 0 else 'behind'} this machine's",
            is_skewed,
            "due times given as dates will be off: set the clocks" if is_skewed else "",
        ),
    ]


async def _readers(connection: Connection, queue: str) -> list[Finding]:
    """The readers of the queue's events, and whether they keep up."""
    try:
        kept = await connection.run(retention.look(Log.events(Keys(queue))))
    except ChasquiError:  # the user may lack the rights
        return []
    return [_reader(queue, one) for one in kept.readers]


async def _schedules(connection: Connection, queue: str, known: set[str]) -> list[Finding]:
    """The schedules that tasks have written and that no task has any more: their jobs go to the
    dead-letter queue."""
    specs = await connection.run(repeatables.listing(Keys(queue), _MOST_SPECS))
    left = [spec.key for spec in specs if spec.key.startswith(SCHEDULE_PREFIX)]
    return [
        Finding(
            "schedule",
            f"{key} of queue {queue} has no task in the app",
            is_risk=True,
            advice=f"if no other version has it: chasqui repeatable remove {queue} {key}",
        )
        for key in left
        if key not in known
    ]


def _reader(queue: str, reader: LogReader) -> Finding:
    is_late = reader.is_alive and reader.lag is not None and reader.lag > reader.hold * _FULL
    advice = ""
    if reader.lost:
        advice = "events were trimmed before it read them: let it run, or hold more for it"
    elif is_late:
        advice = "it holds almost as much as it may: let it read faster, or hold more for it"
    elif not reader.is_alive:
        advice = f"nothing is held for it: start it, or chasqui retention {queue} --forget …"
    return Finding("events reader", str(reader), bool(reader.lost) or is_late, advice)


def _rights(found: Rights) -> Iterator[Finding]:
    """The roles that the user has the rights for. It is a risk if there is none."""
    if found.missing is None:
        advice = "its rights are unknown: to see them takes Redis 7 and the right to ACL DRYRUN"
        yield Finding("user", found.user, advice=advice)
        return
    able = [role for role, missing in found.missing.items() if not missing]
    lacks = [
        f"{role} lacks {', '.join(missing)}" for role, missing in found.missing.items() if missing
    ]
    yield Finding(
        "user", f"{found.user}: {', '.join(able) or 'no role'}", not able, "; ".join(lacks)
    )
