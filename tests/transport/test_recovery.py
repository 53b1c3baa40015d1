"""What both connections decide alike, without a server."""

import hashlib
import itertools
import socket

import pytest

from chasqui._core.reply import ProtocolError, ReplyError
from chasqui.model.config import Endpoint
from chasqui.errors import AuthenticationError, OutcomeUnknownError, ServerError, UnreachableError
from chasqui.transport.recovery import LOOK_S, Redial, Search, by_turns, dial_failure, is_final, loss, refuse
from chasqui.transport.request import Effect, Request, Script, commands
from chasqui.scripts.loading import call
from chasqui.transport.server import Answer, NotReadyError, answer_to, exception_for, moved_to
from tests.proxy import split

ENDPOINT = Endpoint.parse("redis://localhost:6379")


def get() -> Request:
    return commands(("GET", "x"), effect=Effect.READ)


# ── Addresses ─────────────────────────────────────────────────────────────────────────────────────


def test_families_take_turns_and_the_order_within_one_stays() -> None:
    def info(family: int, name: str) -> tuple[int, int, int, str, str]:
        return (family, socket.SOCK_STREAM, 6, "", name)

    found = [info(socket.AF_INET6, name) for name in "abc"] + [info(socket.AF_INET, "x")]
    assert [address for *_, address in by_turns(found)] == ["a", "x", "b", "c"]
    assert by_turns([]) == []


# ── Redial ────────────────────────────────────────────────────────────────────────────────────────


def search_for(redial: Redial, since_s: float, until_s: float) -> list[float]:
    """When a connection dials that finds nothing."""
    now_s, times = since_s, []
    while now_s < until_s:
        if wait_s := redial.wait_s(now_s):
            now_s += min(wait_s, LOOK_S)
            continue
        redial.dialling(now_s)
        times.append(now_s)
    return times


def test_a_server_that_is_away_is_dialled_five_times_a_second_at_most_and_twice_at_least() -> None:
    times = search_for(Redial(Search()), 100.0, 1000.0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 100.0
    assert min(gaps) >= 0.2
    assert max(gaps[:200]) < 0.25
    assert 0.4 < max(gaps) < 0.5


def test_all_who_search_share_their_dials() -> None:
    search = Search()
    redials = [Redial(search) for _ in range(4)]
    times = []
    for ms in range(0, 30_000, 10):
        for redial in redials:
            if not redial.wait_s(ms / 1000):
                redial.dialling(ms / 1000)
                times.append(ms / 1000)
    assert all(after - before >= 1.0 for before, after in zip(times, times[5:], strict=False))


def test_once_the_server_is_found_nobody_waits() -> None:
    search = Search()
    one, other = Redial(search), Redial(search)
    times = search_for(one, 0.0, 10.0)
    one.dialling(10.3)
    assert other.wait_s(10.3) > 0.1
    one.link_up(10.3)
    assert other.wait_s(10.3) == 0.0
    one.link_down(10.4)
    assert len(times) > 40
    assert search_for(other, 10.4, 11.4)[0] == 10.4  # and the next search begins anew


def test_links_that_break_young_are_made_ever_more_slowly() -> None:
    redial = Redial(Search())
    waits = []
    for now_s in range(20):
        redial.dialling(now_s)
        redial.link_up(now_s)
        redial.link_down(now_s + 0.5)
        waits.append(redial.wait_s(now_s + 0.5))
    assert waits[0] == 0.0  # at once, in case the server has moved
    assert 0.2 <= waits[1] < waits[2] + 0.1
    assert 0.4 <= waits[-1] <= 0.52
    redial.link_up(20.0)
    redial.link_down(30.0)
    assert redial.wait_s(30.0) == 0.0


def test_what_one_link_did_does_not_slow_the_others_down() -> None:
    """Every one of them may be broken by what it alone is sent."""
    search = Search()
    broken, other = Redial(search), Redial(search)
    for now_s in range(5):
        broken.link_up(now_s)
        broken.link_down(now_s + 0.1)
    assert broken.wait_s(4.1) > 0.3
    assert other.wait_s(4.1) == 0.0


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
