"""Adds that wait for the disk or for a replica, without I/O.

The wait, WAITAOF or WAIT, is for what its link wrote before. So the last chunk of each add goes out
with the wait right behind it. Should the link be lost, all of an add is sent once more: a server
that lost jobs as it died is given them anew, and is then waited for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from chasqui._core.reply import ReplyError
from chasqui.adding import Durable
from chasqui.errors import OutcomeUnknownError
from chasqui.request import Effect, Plan, Request, commands
from chasqui.server import exception_for

#: How long the disk or the replica may take to confirm.
WAIT_MS: Final = 10_000
#: How often the chunks of an add are sent, if the link is lost in their midst each time.
ROUNDS: Final = 5


def confirmed(chunks: Sequence[Callable[[], Request]], durable: Durable) -> Plan[list[Any]]:
    """For each chunk its reply or its exception, once all of them are safe.

    They are made one after the other as they are sent, and may be made again: each must be the same
    then, and applied once however often it is sent.
    """
    why: object = f"the link was lost {ROUNDS} times meanwhile"
    for number in range(ROUNDS):
        replies, is_one_link, answer = yield from _sent(chunks, durable)
        failure = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if failure is not None and number > 0:  # what it says is not true of the first time
            why = failure
            break
        if failure is not None or isinstance(replies[-1], list):
            return replies  # refused, or no room: nobody waits for the disk
        if is_one_link:
            _check(answer, durable)
            return replies
    raise OutcomeUnknownError(f"the jobs were added, but perhaps not for good: {why}")


def _sent(
    chunks: Sequence[Callable[[], Request]], durable: Durable
) -> Plan[tuple[list[Any], bool, Any]]:
    """The replies, up to the first exception; whether all came over one link; and the answer to the
    wait."""
    *most, last = chunks
    made: list[Request] = []
    replies: list[Any] = []
    try:
        if most:
            replies = yield _made(most, made)
        if not any(isinstance(reply, Exception) for reply in replies):
            request = DurableRequest(last(), durable)
            reply, answer = yield request
            replies.append(exception_for(reply) if isinstance(reply, ReplyError) else reply)
            return replies, all(one.link is request.link for one in made), answer
    except Exception as error:
        replies.append(error)
    return replies, False, None


def _made(chunks: Iterable[Callable[[], Request]], made: list[Request]) -> Iterator[Request]:
    for make in chunks:
        made.append(make())
        yield made[-1]


class DurableRequest(Request):
    """A chunk that is to be confirmed before it is answered. The reply is its own and that to the
    wait behind it."""

    __slots__ = ("durable",)

    def __init__(self, chunk: Request, durable: Durable) -> None:
        # By its source: were the script unknown, the wait behind it would be for nothing.
        if chunk.script is not None:
            chunk.send_source()
        super().__init__(chunk.frame, Effect.IDEMPOTENT, raises=False)
        self.durable = durable


def wait_words(durable: Durable, wait_ms: int) -> tuple[str | int, ...]:
    """The command that waits for the disk or a replica."""
    return ("WAITAOF", 1, 0, wait_ms) if durable == "disk" else ("WAIT", 1, wait_ms)


def _check(answer: Any, durable: Durable) -> None:
    """Raise OutcomeUnknownError if the wait was in vain."""
    if isinstance(answer, ReplyError):
        raise OutcomeUnknownError(f"the jobs were added, but perhaps not for good: {answer}")
    if (answer[0] if durable == "disk" else answer) < 1:
        raise OutcomeUnknownError(
            f"the jobs were added, but no {durable} confirmed them within {WAIT_MS} ms"
        )


def with_wait(requests: Sequence[DurableRequest]) -> Request:
    """All of them in one, with one wait behind."""
    wait = commands(wait_words(requests[0].durable, WAIT_MS), effect=Effect.READ)
    return Request(
        b"".join([*(request.frame for request in requests), wait.frame]),
        Effect.IDEMPOTENT,
        count=len(requests) + 1,
        raises=False,
    )
