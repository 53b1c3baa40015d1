"""Adds that wait for the disk or for a replica, without I/O.

The wait, WAITAOF or WAIT, is for what its link wrote before. So the last chunk of each add goes out
with the wait right behind it. Should the link be lost, all of an add is sent once more: a server
that lost jobs as it died is given them anew, and is then waited for.

Behind the wait it is asked whether the last chunk is still there. A primary that becomes a replica
loses what only it had, and Valkey lets a wait outlive that: when the server is primary again, its
replicas answer it for another history.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from chasqui._core.reply import ReplyError
from chasqui.adding import Durable
from chasqui.errors import OutcomeUnknownError
from chasqui.transport.request import Effect, Plan, Request, commands
from chasqui.transport.server import exception_for

#: How long the disk or the replica may take to confirm.
WAIT_MS: Final = 10_000
#: How often the chunks of an add are sent, if the link is lost in their midst each time.
ROUNDS: Final = 5


def confirmed(
    chunks: Sequence[Callable[[], Request]], mark: Request, durable: Durable
) -> Plan[list[Any]]:
    """For each chunk its reply or its exception, once all of them are safe.

    They are made one after the other as they are sent, and may be made again: each must be the same
    then, and applied once however often it is sent. `mark` asks whether the last one is in.
    """
    why: object = f"the link was lost {ROUNDS} times meanwhile"
    for number in range(ROUNDS):
        replies, are_in, answer = yield from _sent(chunks, mark, durable)
        failure = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if failure is not None and number > 0:  # what it says is not true of the first time
            why = failure
            break
        if failure is not None or isinstance(replies[-1], list):
            return replies  # refused, or no room: nobody waits for the disk
        if are_in:
            _check(answer, durable)
            return replies
    raise OutcomeUnknownError(f"the jobs were added, but perhaps not for good: {why}")


def _sent(
    chunks: Sequence[Callable[[], Request]], mark: Request, durable: Durable
) -> Plan[tuple[list[Any], bool, Any]]:
    """The replies, up to the first exception; whether all came over one link to a server that still
    has them; and the answer to the wait."""
    *most, last = chunks
    made: list[Request] = []
    replies: list[Any] = []
    try:
        if most:
            replies = yield _made(most, made)
        if not any(isinstance(reply, Exception) for reply in replies):
            request = DurableRequest(last(), mark, durable)
            reply, answer, is_in = yield request
            replies.append(exception_for(reply) if isinstance(reply, ReplyError) else reply)
            are_in = is_in == 1 and all(one.link is request.link for one in made)
            return replies, are_in, answer
    except Exception as error:
        replies.append(error)
    return replies, False, None


def _made(chunks: Iterable[Callable[[], Request]], made: list[Request]) -> Iterator[Request]:
    for make in chunks:
        made.append(make())
        yield made[-1]


class DurableRequest(Request):
    """A chunk that is to be confirmed before it is answered. The reply is its own, that to the wait
    behind it, and whether the chunk was in after that."""

    __slots__ = ("durable", "mark")

    def __init__(self, chunk: Request, mark: Request, durable: Durable) -> None:
        # By its source: were the script unknown, the wait behind it would be for nothing.
        if chunk.script is not None:
            chunk.send_source()
        super().__init__(chunk.frame, Effect.IDEMPOTENT, raises=False)
        self.mark = mark
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
    """All of them in one, with one wait behind, and their marks behind that."""
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
    """What a request `with_wait` was answered, as the replies of those in it."""
    count = len(replies) // 2
    answer = replies[count]
    for reply, is_in in zip(replies[:count], replies[count + 1 :], strict=True):
        yield reply, answer, is_in
