"""Producer: payloads in, ids out. The engine under `Queue`; what it sends, plans.py decides."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from chasqui import dlq, repeatables
from chasqui._core.options import UNIQUE
from chasqui.adding import CHUNK_BYTES, PLAIN, Batch, check_request_timeout
from chasqui.model.config import CredentialProvider, Endpoint, check_credential_provider
from chasqui.transport.connection import REQUEST_TIMEOUT_S, Connection
from chasqui.producing.job_options import check_max_delay, due_at, due_of, retry_of
from chasqui.errors import ClosedError, OutcomeUnknownError, PayloadTooLargeError
from chasqui.model.job import Job
from chasqui.model.keys import Keys, check_job_id, check_job_name, shown
from chasqui.plans import Plans
from chasqui.transport.request import Plan

T = TypeVar("T")

#: Single adds that leave together: the server works on them while the next ones are made. With 100
#: tasks that add, 50 gave 250k jobs/s, all that meet in a turn 163k, 25 at a time 216k.
TURN_JOBS: Final = 50
#: The server hangs up on an argument of more than 512 MiB; the envelope takes a little of it.
MAX_PAYLOAD_BYTES: Final = (512 << 20) - 1024


class Turn:
    """Single adds that met in a turn of the event loop: a chunk, with one reply for all of them."""

    __slots__ = (
        "created_at_ms", "futures", "ids", "loop", "names", "payloads", "retries", "size"
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.payloads: list[bytes] = []
        self.names: list[str] = []
        self.retries: list[bytes | None] = []
        #: Bytes of all payloads.
        self.size = 0
        self.futures: list[asyncio.Future[tuple[str, int]]] = []
        #: Of the jobs, once they are encoded.
        self.ids: list[str] = []
        self.created_at_ms = 0

    # Loops, not `any` and `all` of a generator: mostly there is one future, and one look is enough.

    def drop_cancelled(self) -> None:
        """Forget the adds that nobody waits for any more: they were never sent."""
        for future in self.futures:
            if future.done():
                break
        else:
            return
        kept = [i for i, future in enumerate(self.futures) if not future.done()]
        self.payloads = [self.payloads[i] for i in kept]
        self.names = [self.names[i] for i in kept]
        self.retries = [self.retries[i] for i in kept]
        self.futures = [self.futures[i] for i in kept]

    def done(self) -> bool:
        for future in self.futures:  # noqa: SIM110
            if not future.done():
                return False
        return True

    def set_result(self, reply: Any, /) -> None:
        for future, job_id in zip(self.futures, self.ids, strict=True):
            if not future.done():
                future.set_result((job_id, self.created_at_ms))

    def set_exception(self, error: Exception, /) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


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
        check_credential_provider(credential_provider)
        self.keys = Keys(queue_name)
        self.plans = Plans(self.keys, max_stream_len)
        self.max_delay_s = check_max_delay(max_delay_secs)
        self.connection = Connection(
            Endpoint.parse(redis_url, tls=tls),
            key=self.keys.stream,
            client_name="chasqui-producer",
            credential_provider=credential_provider,
            request_timeout_s=check_request_timeout(request_timeout_s),
        )
        self._turn: Turn | None = None

    def stream_key(self) -> str:
        return self.keys.stream.decode()

    def delayed_key(self) -> str:
        return self.keys.delayed.decode()

    def dlq_key(self) -> str:
        return self.keys.dlq.decode()

    def producer_id(self) -> str:
        return self.plans.numbering.producer_id

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
        return (await self.put(checked))[0]

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
        return (await self.run(self.plans.add(Batch(payloads, names)))).ids

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
        kind, due_ms = due
        ids: list[str | None] | None = None
        count = len(payloads)
        if (job_id := opts.get("id")) is not None:
            if count != 1:
                raise ValueError("opts.id can only be set when there is one payload")
            ids, kind = [check_job_id(job_id)], kind | UNIQUE
        batch = Batch(
            payloads,
            name,
            ids,
            None if encoded is None else [encoded] * count,
            [kind] * count if kind else None,
            [due_ms] * count if kind else None,
        )
        return (await self.run(self.plans.add(batch))).ids

    def put(
        self, payload: bytes, name: str = "", retry: bytes | None = None
    ) -> asyncio.Future[tuple[str, int]]:
        """Add one checked job without delay or id of its own; its id and creation time to be.

        Adds of one turn of the event loop share chunks, of TURN_JOBS at most.
        """
        turn, size = self._turn, len(payload)
        if (
            turn is None
            or turn.loop is not asyncio.get_running_loop()
            or len(turn.payloads) == TURN_JOBS
            or turn.size + size > CHUNK_BYTES
        ):
            turn = self._next_turn()
        future: asyncio.Future[tuple[str, int]] = turn.loop.create_future()
        turn.payloads.append(payload)
        turn.size += size
        turn.names.append(name)
        turn.retries.append(retry)
        turn.futures.append(future)
        return future

    async def put_chunk(self, batch: Batch) -> list[Job]:
        """Add a batch that is one chunk of jobs without delay or id of their own; the jobs.

        As its plan would; without one a call of 50 takes a quarter less of the client.
        """
        connection = self.connection
        loop = connection.check_owner()
        if connection.is_congested:
            await connection.room()
        now_ms = time.time_ns() // 1_000_000
        ids: list[str] = []
        part = slice(0, len(batch.payloads))
        added: asyncio.Future[Any] = loop.create_future()
        try:
            connection.send(self.plans.numbering.chunk(batch, part, PLAIN, now_ms, ids), added)
            jobs = batch.jobs(ids, now_ms)  # while the server works on them
            await added
        except MemoryError as error:
            if not ids:
                raise  # nothing was sent
            raise OutcomeUnknownError("no memory is left for what a bulk answers") from error
        finally:
            added.cancel()  # unless it is done: nobody waits for it any more
        return jobs

    def _next_turn(self) -> Turn:
        loop = self.connection.check_owner()
        if self.connection.is_closed:
            raise ClosedError("the producer was shut down")
        if self._turn is not None:
            self._send_turn()
        turn = self._turn = Turn(loop)
        loop.call_soon(self._send_turn)
        return turn

    def _send_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        turn.drop_cancelled()
        count = len(turn.payloads)
        if count == 0:
            return
        retries = turn.retries if any(turn.retries) else None
        batch = Batch(turn.payloads, turn.names, None, retries)
        turn.created_at_ms = now_ms = time.time_ns() // 1_000_000
        try:
            self.connection.check_owner()  # a fork may lie between the turn's begin and its end
            request = self.plans.numbering.chunk(batch, slice(0, count), PLAIN, now_ms, turn.ids)
            self.connection.send(request, turn)
        except Exception as error:
            turn.set_exception(error)

    # ── Everything else ─────────────────────────────────────────────────────────────────────────

    async def cancel_delayed(self, job_id: str) -> bool:
        """Take a job back that is delayed or waits for its retry; False if there was none."""
        return (await self.cancel_delayed_bulk([job_id]))[0]

    async def cancel_delayed_bulk(self, job_ids: Sequence[str]) -> list[bool]:
        return await self.run(self.plans.cancel(job_ids))

    async def peek_dlq(self, limit: int) -> list[dict[str, Any]]:
        return [entry.to_dict() for entry in await self.run(dlq.peek(self.keys, limit))]

    async def replay_dlq(self, limit: int) -> int:
        return await self.run(dlq.replay(self.plans, limit))

    async def upsert_repeatable(self, spec: Mapping[str, Any]) -> str:
        """Write a repeat spec given as a dict; its key."""
        return await self.run(repeatables.upsert(self.plans, repeatables.from_dict(spec)))

    async def list_repeatable(self, limit: int) -> list[dict[str, Any]]:
        listed = await self.run(repeatables.listing(self.keys, limit))
        return [repeatables.to_dict(meta) for meta in listed]

    async def remove_repeatable_by_key(self, key: str) -> bool:
        return await self.run(repeatables.remove(self.plans, key))

    async def get_result(self, job_id: str) -> bytes | None:
        """The stored return value of a job, encoded; None if there is none."""
        return (await self.get_result_bulk([job_id]))[0]

    async def get_result_bulk(self, job_ids: Sequence[str]) -> list[bytes | None]:
        return await self.run(self.plans.stored_results(job_ids))


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
