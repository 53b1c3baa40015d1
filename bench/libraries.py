"""Whom we measure: each library, where it comes from, and how many jobs make a fair run of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Environment:
    """What one set of libraries is installed into, because their requirements agree."""

    name: str
    #: The distributions; nothing for the environment that the benchmark itself runs in.
    requirements: tuple[str, ...] = ()
    is_node: bool = False


OURS = Environment("ours")
CHASQUIMQ = Environment("chasquimq", ("chasquimq==1.3.0", "redis<7", "hiredis", "uvloop"))
ARQ = Environment("arq", ("arq", "redis[hiredis]<6", "uvloop"))
PEERS = Environment(
    "peers",
    (
        *("bullmq", "celery[redis]", "dramatiq[redis]", "huey", "rq", "saq[hiredis]", "streaq"),
        *("taskiq", "taskiq-redis", "hiredis", "redis", "uvloop"),
    ),
)
NODE = Environment("node", ("bullmq", "ioredis"), is_node=True)

#: Jobs of one run, by scenario; chosen so that it takes seconds, not an instant and not minutes.
JOBS = {
    "single": 10_000,
    "gather": 50_000,
    "bulk": 100_000,
    "mixed": 10_000,
    "drain": 100_000,
    "retry": 20_000,
    "delayed": 50_000,
}
SLOW = {
    "single": 3_000,
    "gather": 8_000,
    "bulk": 20_000,
    "mixed": 2_000,
    "drain": 5_000,
    "retry": 2_000,
    "delayed": 5_000,
}


@dataclass(frozen=True)
class Library:
    """One peer, or ourselves."""

    name: str
    title: str
    environment: Environment
    jobs: Mapping[str, int] = field(default_factory=lambda: JOBS)
    #: The only scenarios that it has; None: all.
    scenarios: frozenset[str] | None = None


LIBRARIES = {
    library.name: library
    for library in (
        Library(
            "chasqui",
            "chasqui",
            OURS,
            JOBS
            | {"single": 30_000, "gather": 200_000, "bulk": 300_000, "mixed": 100_000}
            | {"drain": 200_000, "retry": 50_000},
        ),
        Library("chasquimq", "chasquimq", CHASQUIMQ),
        Library("bullmq_node", "BullMQ (Node)", NODE),
        Library("arq", "arq", ARQ, SLOW),
        Library("saq", "SAQ", PEERS, SLOW),
        Library("streaq", "streaQ", PEERS, SLOW),
        Library("taskiq", "taskiq-redis", PEERS, SLOW | {"drain": 10_000}),
        Library("dramatiq", "dramatiq", PEERS, SLOW | {"drain": 10_000}),
        Library("rq", "RQ", PEERS, SLOW | {"drain": 1_000, "retry": 500, "delayed": 500}),
        Library("celery", "Celery", PEERS, SLOW),
        Library("huey", "huey", PEERS, SLOW | {"single": 8_000}),
        Library("bullmq_py", "BullMQ (Python)", PEERS, SLOW),
        Library(
            "limit",
            "the limit",
            OURS,
            JOBS | {"bulk": 300_000, "drain": 200_000},
            frozenset({"bulk50", "bulk50_ready", "bulk1000", "bulk1000_ready", "drain"}),
        ),
        Library(
            "floor",
            "any library at best",
            OURS,
            JOBS | {"bulk": 300_000},
            frozenset({"bulk50", "bulk1000"}),
        ),
        Library(
            "redis_benchmark",
            "redis-benchmark",
            OURS,
            JOBS | {"bulk": 500_000},
            frozenset({"bulk50", "bulk1000"}),
        ),
    )
}
