"""What both connections decide alike, without a server."""

import hashlib
import itertools

import pytest

from chasqui._core.reply import ProtocolError, ReplyError
from chasqui.config import Endpoint
from chasqui.errors import AuthenticationError, OutcomeUnknownError, ServerError, UnreachableError
from chasqui.policy import Pace, dial_failure, is_final, loss, refuse
from chasqui.request import Effect, Request, Script, commands
from chasqui.scripts import call
from chasqui.server import Answer, NotReadyError, answer_to, exception_for, moved_to
from tests.proxy import split

ENDPOINT = Endpoint.parse("redis://localhost:6379")


def get() -> Request:
    return commands(("GET", "x"), effect=Effect.READ)


# ── Pace ────────────────────────────────────────────────────────────────────────────────────────


def test_dials_that_fail_are_at_most_five_a_second_and_ever_fewer() -> None:
    pace = Pace()
    now_s, times = 100.0, []
    while now_s < 160.0:
        now_s += pace.wait_s(now_s)
        pace.dialling(now_s)
        times.append(now_s)
    assert times[:2] == [100.0, 100.0]  # one more at once, in case the server has moved
    gaps = [after - before for before, after in itertools.pairwise(times[1:])]
    assert min(gaps) >= 0.2
    assert max(gaps) < 1.0  # a server that is back is found within a second
    assert len(times) < 90


def test_a_good_link_makes_the_next_dial_free() -> None:
    pace = Pace()
    for _ in range(10):
        pace.dialling(0.0)
    assert pace.wait_s(0.0) >= 0.7
    pace.link_up(10.0)
    pace.link_down(10.5)
    pace.dialling(10.5)
    assert pace.wait_s(10.5) >= 0.7  # it broke too soon
    pace.link_up(20.0)
    pace.link_down(30.0)
    assert pace.wait_s(30.0) == 0.0


def test_time_that_passed_counts_as_waited() -> None:
    pace = Pace()
    for _ in range(10):
        pace.dialling(0.0)
    assert pace.wait_s(3600.0) == 0.0


# ── Refusals ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("LOADING Redis is loading the dataset in memory", Answer.WAIT),
        ("BUSY Redis is busy running a script", Answer.WAIT),
        ("BUSYGROUP Consumer Group name already exists", Answer.RAISE),
        ("CLUSTERDOWN Hash slot not served", Answer.WAIT),
        ("TRYAGAIN Multiple keys request during rehashing of slot", Answer.WAIT),
        ("READONLY You can't write against a read only replica.", Answer.REDIAL),
        ("ERR Error running script (call to f_1): @user_script:1: -READONLY You", Answer.REDIAL),
        ("MOVED 3999 127.0.0.1:6381", Answer.REDIAL),
        ("ASK 3999 127.0.0.1:6381", Answer.ASK),
        ("ASK 3999 :6381", Answer.WAIT),
        ("NOAUTH Authentication required.", Answer.REDIAL),
        ("UNBLOCKED force unblock from blocking operation", Answer.REDIAL),
        ("OOM command not allowed", Answer.RAISE),
        ("WRONGTYPE Operation against a key", Answer.RAISE),
        ("ERR syntax error", Answer.RAISE),
    ],
)
def test_each_refusal_has_its_answer(message: str, answer: Answer) -> None:
    request = get()
    assert refuse(request, ReplyError(message)) is answer
    assert request.tries == (0 if answer is Answer.RAISE else 1)


def test_several_commands_of_which_some_were_applied_are_not_sent_again() -> None:
    error = ReplyError("READONLY You can't write")
    calls = (("INCR", "a"), ("INCR", "b"))
    assert refuse(commands(*calls, effect=Effect.ONCE), error) is Answer.RAISE
    assert refuse(commands(*calls, effect=Effect.IDEMPOTENT), error) is Answer.REDIAL
    ask = ReplyError("ASK 1 127.0.0.1:6381")
    assert refuse(commands(*calls, effect=Effect.IDEMPOTENT), ask) is Answer.WAIT


def test_an_unknown_script_is_sent_whole() -> None:
    source = b"return KEYS[1]"
    script = Script("s", source, hashlib.sha1(source).hexdigest().encode())
    request = call(script, [b"key"], [b"$7\r\nEVALSHA\r\n"], Effect.READ)
    before = request.frame
    assert refuse(request, ReplyError("NOSCRIPT No matching script.")) is Answer.LOAD
    expected = commands(("EVAL", source, 1, b"key", b"$7\r\nEVALSHA\r\n"), effect=Effect.READ)
    assert request.frame == expected.frame != before
    assert refuse(request, ReplyError("NOSCRIPT No matching script.")) is Answer.RAISE
    assert refuse(get(), ReplyError("NOSCRIPT No matching script.")) is Answer.RAISE


@pytest.mark.parametrize(
    ("message", "node"),
    [
        ("MOVED 1 127.0.0.1:6381", ("127.0.0.1", 6381)),
        ("ASK 1 [::1]:6381", ("::1", 6381)),
        ("ASK 1 ::1:6381", ("::1", 6381)),
        ("MOVED 1 :6381", None),
        ("MOVED 1", None),
        ("ERR MOVED", None),
    ],
)
def test_the_node_that_a_redirection_names(message: str, node: tuple[str, int] | None) -> None:
    assert moved_to(ReplyError(message)) == node


# ── What callers get ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("effect", list(Effect))
def test_only_what_was_sent_and_not_answered_is_in_doubt(effect: Effect) -> None:
    request = commands(("INCR", "x"), effect=effect)
    assert type(loss(request, ENDPOINT)) is UnreachableError
    request.refusal = ReplyError("LOADING Redis is loading")
    told = loss(request, ENDPOINT)
    assert isinstance(told, ServerError)
    assert told.code == "LOADING"
    request.is_in_doubt = True
    unknown = effect is not Effect.READ
    assert isinstance(loss(request, ENDPOINT), OutcomeUnknownError) == unknown


def test_which_failed_dials_end_the_wait() -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    assert is_final(refused, was_connected=False)
    assert not is_final(refused, was_connected=True)
    assert not is_final(NotReadyError("LOADING x", code="LOADING"), was_connected=False)
    assert is_final(AuthenticationError("WRONGPASS"), was_connected=True)
    assert is_final(LookupError("no vault"), was_connected=True)
    assert isinstance(dial_failure(ENDPOINT, refused), UnreachableError)
    assert isinstance(dial_failure(ENDPOINT, LookupError()), LookupError)


def test_errors_of_permission_are_authentication_errors() -> None:
    for message in ("NOPERM this user has no permissions", "WRONGPASS invalid", "NOAUTH x"):
        assert isinstance(exception_for(ReplyError(message)), AuthenticationError)
    inner = ReplyError("ERR Error running script: @user_script: -OOM command not allowed")
    error = exception_for(inner)
    assert isinstance(error, ServerError)
    assert error.code == "OOM"
    assert answer_to(inner) is Answer.RAISE


# ── The proxy's own eyes ────────────────────────────────────────────────────────────────────────


def test_the_proxy_finds_the_end_of_every_kind_of_frame() -> None:
    frames = [
        b"+OK\r\n",
        b"-ERR x\r\n",
        b":1\r\n",
        b"$3\r\na\r\n\r\n",
        b"$-1\r\n",
        b"_\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*2\r\n*1\r\n:1\r\n$1\r\nx\r\n",
        b"%1\r\n+a\r\n*1\r\n:1\r\n",
        b">2\r\n+a\r\n:1\r\n",
        b"|1\r\n+a\r\n:1\r\n:2\r\n",
        b"=5\r\ntxt:x\r\n",
        b"#t\r\n",
    ]
    data = b"".join(frames)
    assert split(data) == (frames, b"")
    for cut in range(len(data)):
        whole, rest = split(data[:cut])
        assert b"".join(whole) + rest == data[:cut]
        assert whole == frames[: len(whole)]


@pytest.mark.fault(44)
@pytest.mark.parametrize("port", ["0", "65536", "99999999999", "²", "-1", "x", ""])
def test_a_redirection_to_no_port_names_no_node(port: str) -> None:
    assert moved_to(ReplyError(f"MOVED 7 127.0.0.1:{port}")) is None


@pytest.mark.fault(44)
def test_a_greeting_that_is_no_resp_is_a_broken_link() -> None:
    broken = ProtocolError("Protocol error, got '?'")
    assert not is_final(broken, was_connected=True)
    assert isinstance(dial_failure(Endpoint.parse("redis://h"), broken), UnreachableError)
