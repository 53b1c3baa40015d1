"""Adds that wait for the disk or for a replica, without I/O.

The wait, WAITAOF or WAIT, covers what the same link wrote before it. So the last chunk of each add
goes out with the wait right behind it. If the link is lost, the whole add is sent again: a server
that lost jobs as it died gets them anew, and then the wait covers them.

Behind the wait goes the question whether the last chunk is still in. A primary that becomes a
replica loses what only it had, and Valkey lets a wait outlive that: when the server is primary
again, its replicas confirm another history.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from chasqui._core.reply import ReplyError
from chasqui.errors import OutcomeUnknownError
from chasqui.producing.settings import Durable
from chasqui.transport.request import Effect, Plan, Request, commands
from chasqui.transport.server import exception_for

#: How long the disk or the replica may take to confirm.
WAIT_MS: Final = 10_000
#: How often an add is sent, if the link is lost during each try.
ROUNDS: Final = 5


def confirmed(
    chunks: Sequence[Callable[[], Request]], mark: Request, durable: Durable
) -> Plan[list[Any]]:
    """For each chunk its reply or its exception, once all of them are confirmed.

    A chunk is made as it is sent, and made again if the add is sent again. It must be the same
    chunk then, applied once however often it is sent. `mark` asks whether the last one is in.
    """
    why: object = f"the link was lost {ROUNDS} times meanwhile"
    for number in range(ROUNDS):
        replies, are_in, wait_reply = yield from _sent(chunks, mark, durable)
        failure = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if failure is not None and number > 0:  # an earlier try may have added the jobs
            why = failure
            break
        if failure is not None or isinstance(replies[-1], list):
            return replies  # refused, or no room: there is nothing to confirm
        if are_in:
            _check(wait_reply, durable)
            return replies
    raise OutcomeUnknownError(f"the jobs were added, but perhaps not for good: {why}")


def _sent(
    chunks: Sequence[Callable[[], Request]], mark: Request, durable: Durable
) -> Plan[tuple[list[Any], bool, Any]]:
    """The replies, up to the first exception; whether all chunks went over one link to a server
    that still has them; and the reply to the wait."""
    *most, last = chunks
    made: list[Request] = []
    replies: list[Any] = []
    try:
        if most:
            replies = yield _made(most, made)
        if not any(isinstance(reply, Exception) for reply in replies):
            request = DurableRequest(last(), mark, durable)
            reply, wait_reply, is_in = yield request
            replies.append(exception_for(reply) if isinstance(reply, ReplyError) else reply)
            are_in = is_in == 1 and all(one.link is request.link for one in made)
            return replies, are_in, wait_reply
    except Exception as error:
        replies.append(error)
    return replies, False, None


def _made(chunks: Iterable[Callable[[], Request]], made: list[Request]) -> Iterator[Request]:
    for make in chunks:
        made.append(make())
        yield made[-1]


class DurableRequest(Request):
    """A chunk with a wait behind it. The reply is a tuple: the chunk's own reply, that to the wait,
    and whether the chunk was in after the wait."""

    __slots__ = ("durable", "mark")

    def __init__(self, chunk: Request, mark: Request, durable: Durable) -> None:
        # By its source: if the server did not know the script, the wait would be for nothing.
        if chunk.script is not None:
            chunk.send_source()
        super().__init__(chunk.frame, Effect.IDEMPOTENT, raises=False)
        self.mark = mark
        self.durable = durable


def wait_words(durable: Durable, wait_ms: int) -> tuple[str | int, ...]:
    """The command that waits for the disk or a replica."""
    return ("WAITAOF", 1, 0, wait_ms) if durable == "disk" else ("WAIT", 1, wait_ms)


def _check(wait_reply: Any, durable: Durable) -> None:
    """Raise OutcomeUnknownError if the wait confirmed nothing."""
    if isinstance(wait_reply, ReplyError):
        raise OutcomeUnknownError(f"the jobs were added, but perhaps not for good: {wait_reply}")
    if (wait_reply[0] if durable == "disk" else wait_reply) < 1:
        raise OutcomeUnknownError(
            f"the jobs were added, but no {durable} confirmed them within {WAIT_MS} ms"
        )


def with_wait(requests: Sequence[DurableRequest]) -> Request:
    """One request of all chunks, then one wait, then the marks."""
    wait = commands(wait_words(requests[0].durable, WAIT_MS), effect=Effect.READ)
    frames = [request.frame for request in requests]
    marks = [request.mark.frame for request in requests]
    return Request(
        b"".join([*frames, wait.frame, *marks]),
        Effect.IDEMPOTENT,
        count=2 * len(requests) + 1,
        raises=False,
    )


def replies_for_each(replies: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """The reply to a request `with_wait`, as one reply for each chunk in it."""
    count = len(replies) // 2
    wait_reply = replies[count]
    for reply, is_in in zip(replies[:count], replies[count + 1 :], strict=True):
        yield reply, wait_reply, is_in
