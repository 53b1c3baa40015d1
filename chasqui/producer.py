"""Producer: payloads in, ids out, as in chasquimq."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from chasqui.errors import PayloadTooLargeError
from chasqui.managing import dlq, results
from chasqui.model.config import CredentialProvider, Endpoint
from chasqui.model.keys import Keys, check_job_id, check_job_name, shown
from chasqui.producing.coalescing import PlainAdds
from chasqui.producing.job_options import alike, check_max_delay, due_at, due_of, retry_of
from chasqui.producing.new_jobs import NewJobs
from chasqui.producing.operations import QueueOperations
from chasqui.producing.settings import connection_options
from chasqui.timed import repeatables
from chasqui.transport.connection import REQUEST_TIMEOUT_S, Connection
from chasqui.transport.request import Plan

T = TypeVar("T")

#: The server hangs up on an argument of more than 512 MiB; the envelope takes a little of it.
MAX_PAYLOAD_BYTES: Final = (512 << 20) - 1024


class Producer:
    """Adds encoded payloads to one queue, over one connection. Belongs to one event loop."""

    def __init__(
        self,
        redis_url: str | None,
        queue_name: str,
        *,
        pool_size: int | None = None,
        max_stream_len: int | None = None,
        max_delay_secs: int | None = None,
        credential_provider: CredentialProvider | None = None,
        tls: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """`pool_size` is taken for chasquimq's sake: one pipelined connection does the work."""
        if pool_size is not None and _uint("pool_size", pool_size) == 0:
            raise ValueError("pool_size must be positive, got 0")
        self.keys = Keys(queue_name)
        self.operations = QueueOperations(self.keys, max_stream_len)
        self.max_delay_s = check_max_delay(max_delay_secs)
        self.connection = Connection(
            Endpoint.parse(redis_url, tls=tls),
            **connection_options(self.keys, credential_provider, request_timeout_s),
        )
        self._plain = PlainAdds(self.connection, self.operations.encoder)

    def stream_key(self) -> str:
        return self.keys.stream.decode()

    def delayed_key(self) -> str:
        return self.keys.delayed.decode()

    def dlq_key(self) -> str:
        return self.keys.dlq.decode()

    def producer_id(self) -> str:
        return self.operations.encoder.producer_id

    @property
    def is_closed(self) -> bool:
        return self.connection.is_closed

    async def run(self, plan: Plan[T]) -> T:
        """Run a plan on the producer's connection."""
        return await self.connection.run(plan)

    async def shutdown(self) -> None:
        """Close the connection. A second call does nothing."""
        await self.connection.close()

    # ── Adding ──────────────────────────────────────────────────────────────────────────────────

    async def add(self, payload: bytes) -> str:
        """Add one job; its id."""
        checked = _payload(payload)
        if self.connection.is_congested:
            await self.connection.room()
        return (await self._plain.add(checked))[0]

    async def add_with_options(self, payload: bytes, opts: Mapping[str, Any]) -> str:
        return (await self._add([_payload(payload)], opts))[0]

    async def add_bulk(self, payloads: list[bytes]) -> list[str]:
        """Add many jobs at once; their ids, in order."""
        return await self._add(_payloads(payloads), {})

    async def add_bulk_with_options(
        self, payloads: list[bytes], opts: Mapping[str, Any]
    ) -> list[str]:
        return await self._add(_payloads(payloads), opts)

    async def add_bulk_named(self, entries: list[tuple[str, bytes]]) -> list[str]:
        if not isinstance(entries, list):
            raise TypeError(f"entries must be a list, got {type(entries).__name__}")
        names, payloads = [], []
        for i, entry in enumerate(entries):
            if not isinstance(entry, tuple) or len(entry) != 2:
                raise ValueError(f"entries[{i}] must be a (str, bytes) tuple")
            try:
                names.append(check_job_name(entry[0]))
            except (TypeError, ValueError) as error:
                raise type(error)(f"entries[{i}]: {error}") from None
            payloads.append(_payload(entry[1], f"entries[{i}]"))
        return (await self.run(self.operations.add(NewJobs(payloads, names)))).ids

    async def add_in(self, delay_ms: int, payload: bytes) -> str:
        """Add one job that is due in `delay_ms`."""
        return (await self._add([_payload(payload)], {}, self._due_in(delay_ms)))[0]

    async def add_in_with_options(
        self, delay_ms: int, payload: bytes, opts: Mapping[str, Any]
    ) -> str:
        return (await self._add([_payload(payload)], opts, self._due_in(delay_ms)))[0]

    async def add_in_bulk(self, delay_ms: int, payloads: list[bytes]) -> list[str]:
        return await self._add(_payloads(payloads), {}, self._due_in(delay_ms))

    async def add_at(self, when_ms: int, payload: bytes) -> str:
        """Add one job that is due at `when_ms`, in unix milliseconds."""
        return (await self._add([_payload(payload)], {}, self._due_at(when_ms)))[0]

    async def add_at_with_options(
        self, when_ms: int, payload: bytes, opts: Mapping[str, Any]
    ) -> str:
        return (await self._add([_payload(payload)], opts, self._due_at(when_ms)))[0]

    def _due_in(self, delay_ms: int) -> tuple[int, int]:
        return due_of(_uint("delay_ms", delay_ms), None, self.max_delay_s)

    def _due_at(self, when_ms: int) -> tuple[int, int]:
        return due_at(_uint("when_ms", when_ms), self.max_delay_s)

    async def _add(
        self, payloads: list[bytes], opts: Mapping[str, Any], due: tuple[int, int] = (0, 0)
    ) -> list[str]:
        _check_options("opts", opts, "id", "name", "retry")
        retry = {} if (given := opts.get("retry")) is None else given
        _check_options("opts.retry", retry, "max_attempts", "backoff")
        name = "" if (given := opts.get("name")) is None else check_job_name(given)
        encoded = retry_of(retry.get("max_attempts"), retry.get("backoff"))
        if (job_id := opts.get("id")) is not None:
            if len(payloads) != 1:
                raise ValueError("opts.id can only be set when there is one payload")
            job_id = check_job_id(job_id)
        jobs = alike(payloads, name, due, encoded, job_id)
        return (await self.run(self.operations.add(jobs))).ids

    # ── Everything else ─────────────────────────────────────────────────────────────────────────

    async def cancel_delayed(self, job_id: str) -> bool:
        """Take a job back that is delayed or waits for its retry; False if there was none."""
        return (await self.cancel_delayed_bulk([job_id]))[0]

    async def cancel_delayed_bulk(self, job_ids: Sequence[str]) -> list[bool]:
        return await self.run(self.operations.cancel(job_ids))

    async def peek_dlq(self, limit: int) -> list[dict[str, Any]]:
        return [entry.to_dict() for entry in await self.run(dlq.peek(self.keys, limit))]

    async def replay_dlq(self, limit: int) -> int:
        return await self.run(dlq.replay(self.operations, limit))

    async def upsert_repeatable(self, spec: Mapping[str, Any]) -> str:
        """Write a repeat spec given as a dict; its key."""
        return await self.run(repeatables.upsert(self.operations, repeatables.from_dict(spec)))

    async def list_repeatable(self, limit: int) -> list[dict[str, Any]]:
        listed = await self.run(repeatables.listing(self.keys, limit))
        return [repeatables.to_dict(meta) for meta in listed]

    async def remove_repeatable_by_key(self, key: str) -> bool:
        return await self.run(repeatables.remove(self.operations, key))

    async def get_result(self, job_id: str) -> bytes | None:
        """The stored return value of a job, encoded; None if there is none."""
        return (await self.get_result_bulk([job_id]))[0]

    async def get_result_bulk(self, job_ids: Sequence[str]) -> list[bytes | None]:
        return await self.run(results.stored(self.keys, job_ids))


def _payload(payload: object, what: str = "payload") -> bytes:
    if type(payload) is not bytes:
        raise TypeError(f"{what} must be bytes, got {type(payload).__name__}")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise PayloadTooLargeError(len(payload), MAX_PAYLOAD_BYTES, what)
    return payload


def _payloads(payloads: object) -> list[bytes]:
    if not isinstance(payloads, list):
        raise TypeError(f"payloads must be a list, got {type(payloads).__name__}")
    return [_payload(payload, f"payloads[{i}]") for i, payload in enumerate(payloads)]


def _check_options(what: str, options: object, *known: str) -> None:
    if not isinstance(options, Mapping):
        raise TypeError(f"{what} must be a dict, got {type(options).__name__}")
    for option in options:
        if option not in known:
            raise ValueError(f"{what} has an unknown option {shown(option)}")


def _uint(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{what} must be non-negative; got {shown(value)}")
    return value
