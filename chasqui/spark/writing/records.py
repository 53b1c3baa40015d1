"""What the server stores about exactly-once writes: their records, and the stages of their runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from chasqui.model.keys import Keys
from chasqui.transport.request import Effect, Plan, commands
from chasqui.transport.server import mapping


@dataclass(frozen=True, slots=True)
class Record:
    """The record of a write."""

    app_id: str
    epoch: int
    #: `publishing` or `done`.
    state: str
    jobs: int
    #: When it was recorded, unix seconds.
    at_s: int
    keys: tuple[bytes, ...]
    #: Jobs that are staged and not published yet.
    left: int = 0
    #: When all jobs were published, unix seconds.
    done_s: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that no record names: its run is still going on, or was killed."""

    app_id: str
    #: None if the task did not know it.
    epoch: int | None
    key: bytes
    jobs: int
    #: Its bytes in the server's memory; None if the user may not ask.
    size: int | None
    #: Seconds since its last chunk arrived, and until it expires.
    quiet_s: int
    expires_s: int


def record_key(keys: Keys, app_id: str) -> bytes:
    return keys.spark(f"txn:{app_id}")


def stages_key(keys: Keys, app_id: str) -> bytes:
    """The key of the hash that lists a write's stages, of all its runs."""
    return keys.spark(f"stages:{app_id}")


def stage_key(keys: Keys, app_id: str, part: str) -> bytes:
    return keys.spark(f"stage:{app_id}:{part}")


def read_record(keys: Keys, app_id: str) -> Plan[Record | None]:
    """The record of a write; None if there is none."""
    fields = ("epoch", "state", "jobs", "left", "at", "keys", "done")
    epoch, state, jobs, left, at_s, names, done_s = yield commands(
        ("HMGET", record_key(keys, app_id), *fields), effect=Effect.READ
    )
    if epoch is None:
        return None
    return Record(
        app_id,
        int(epoch),
        state.decode(),
        int(jobs),
        int(at_s),
        tuple(names.split(b"\n")) if names else (),
        int(left),
        None if done_s is None else int(done_s),
    )


def read_stages(keys: Keys, app_id: str) -> Plan[list[Stage]]:
    """The stages of a write that no record names."""
    listed = yield commands(("HGETALL", stages_key(keys, app_id)), effect=Effect.READ)
    if not listed:
        return []
    record = yield from read_record(keys, app_id)
    recorded = () if record is None else record.keys
    found = []
    for key, about in mapping(listed).items():
        ttl_s, size = yield commands(
            ("TTL", key), ("MEMORY", "USAGE", key), effect=Effect.READ, raises=False
        )
        if not isinstance(ttl_s, int) or ttl_s < 0 or key in recorded:
            continue  # it is gone, or recorded
        epoch, jobs, of_s = about.split(b" ")
        found.append(
            Stage(
                app_id,
                int(epoch) if epoch.isdigit() else None,
                key,
                int(jobs),
                size if isinstance(size, int) else None,
                max(0, int(of_s) - ttl_s),
                ttl_s,
            )
        )
    return found


def find_writes(keys: Keys) -> Plan[list[str]]:
    """The names of all writes into a queue that have a record or a stage; sorted."""
    prefixes = record_key(keys, ""), stages_key(keys, "")
    cursor, found = b"0", set[str]()
    while True:
        scan = ("SCAN", cursor, "MATCH", keys.spark("*"), "COUNT", 1000)
        cursor, names = yield commands(scan, effect=Effect.READ)
        for name in names:
            for prefix in prefixes:
                if name.startswith(prefix):
                    found.add(name.removeprefix(prefix).decode(errors="replace"))
        if cursor == b"0":
            return sorted(found)


def staged_chunks(keys: Sequence[bytes]) -> Plan[list[int]]:
    """How many chunks each stage has."""
    if not keys:
        return []
    lengths = yield commands(*(("HLEN", key) for key in keys), effect=Effect.READ)
    return lengths if len(keys) > 1 else [lengths]
