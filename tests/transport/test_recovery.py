"""What both connections decide alike, without a server."""

import hashlib
import itertools
import socket

import pytest

from chasqui._core.reply import ProtocolError, ReplyError
from chasqui.errors import AuthenticationError, OutcomeUnknownError, ServerError, UnreachableError
from chasqui.model.config import Endpoint
from chasqui.scripts.loading import call
from chasqui.transport.recovery import (
    LOOK_S,
    DialPacing,
    SharedDialPacing,
    dial_failure,
    error_for_lost,
    is_final,
    recovery_for,
)
from chasqui.transport.request import Effect, Request, Script, commands
from chasqui.transport.server import NotReadyError, Recovery, exception_for, meaning_of, moved_to
from chasqui.transport.sockets import by_turns
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


# ── The pacing of dials ─────────────────────────────────────────────────────────────────────────


def search_for(pacing: DialPacing, since_s: float, until_s: float) -> list[float]:
    """When a connection dials that finds nothing."""
    now_s, times = since_s, []
    while now_s < until_s:
        if wait_s := pacing.wait_s(now_s):
            now_s += min(wait_s, LOOK_S)
            continue
        pacing.dialling(now_s)
        times.append(now_s)
    return times


def test_a_server_that_is_away_is_dialled_five_times_a_second_at_most_and_twice_at_least() -> None:
    times = search_for(DialPacing(ENDPOINT, SharedDialPacing()), 100.0, 1000.0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 100.0
    assert min(gaps) >= 0.2
    assert max(gaps[:200]) < 0.25
    assert 0.4 < max(gaps) < 0.5


def test_all_who_search_share_their_dials() -> None:
    shared = SharedDialPacing()
    pacings = [DialPacing(ENDPOINT, shared) for _ in range(4)]
    times = []
    for ms in range(0, 30_000, 10):
        for pacing in pacings:
            if not pacing.wait_s(ms / 1000):
                pacing.dialling(ms / 1000)
                times.append(ms / 1000)
    assert all(after - before >= 1.0 for before, after in zip(times, times[5:], strict=False))


def test_once_the_server_is_found_nobody_waits() -> None:
    shared = SharedDialPacing()
    one, other = DialPacing(ENDPOINT, shared), DialPacing(ENDPOINT, shared)
    times = search_for(one, 0.0, 10.0)
    one.dialling(10.3)
    assert other.wait_s(10.3) > 0.1
    one.link_up(10.3)
    assert other.wait_s(10.3) == 0.0
    one.link_down(10.4)
    assert len(times) > 40
    assert search_for(other, 10.4, 11.4)[0] == 10.4  # and the next search begins anew


def test_links_that_break_young_are_made_ever_more_slowly() -> None:
    pacing = DialPacing(ENDPOINT, SharedDialPacing())
    waits = []
    for now_s in range(20):
        pacing.dialling(now_s)
        pacing.link_up(now_s)
        pacing.link_down(now_s + 0.5)
        waits.append(pacing.wait_s(now_s + 0.5))
    assert waits[0] == 0.0  # at once, in case the server has moved
    assert 0.2 <= waits[1] < waits[2] + 0.1
    assert 0.4 <= waits[-1] <= 0.52
    pacing.link_up(20.0)
    pacing.link_down(30.0)
    assert pacing.wait_s(30.0) == 0.0


def test_what_one_link_did_does_not_slow_the_others_down() -> None:
    """Every one of them may be broken by what it alone is sent."""
    shared = SharedDialPacing()
    broken, other = DialPacing(ENDPOINT, shared), DialPacing(ENDPOINT, shared)
    for now_s in range(5):
        broken.link_up(now_s)
        broken.link_down(now_s + 0.1)
    assert broken.wait_s(4.1) > 0.3
    assert other.wait_s(4.1) == 0.0


# ── Refusals ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("LOADING Redis is loading the dataset in memory", Recovery.WAIT),
        ("BUSY Redis is busy running a script", Recovery.WAIT),
        ("BUSYGROUP Consumer Group name already exists", Recovery.RAISE),
        ("CLUSTERDOWN Hash slot not served", Recovery.WAIT),
        ("TRYAGAIN Multiple keys request during rehashing of slot", Recovery.WAIT),
        ("READONLY You can't write against a read only replica.", Recovery.REDIAL),
        ("ERR Error running script (call to f_1): @user_script:1: -READONLY You", Recovery.REDIAL),
        ("MOVED 3999 127.0.0.1:6381", Recovery.REDIAL),
        ("ASK 3999 127.0.0.1:6381", Recovery.ASK),
        ("ASK 3999 :6381", Recovery.WAIT),
        ("NOAUTH Authentication required.", Recovery.REDIAL),
        ("UNBLOCKED force unblock from blocking operation", Recovery.REDIAL),
        ("OOM command not allowed", Recovery.RAISE),
        ("WRONGTYPE Operation against a key", Recovery.RAISE),
        ("ERR syntax error", Recovery.RAISE),
    ],
)
def test_each_refusal_has_its_answer(message: str, answer: Recovery) -> None:
    request = get()
    assert recovery_for(request, ReplyError(message)) is answer
    assert request.tries == (0 if answer is Recovery.RAISE else 1)


def test_several_commands_of_which_some_were_applied_are_not_sent_again() -> None:
    error = ReplyError("READONLY You can't write")
    calls = (("INCR", "a"), ("INCR", "b"))
    assert recovery_for(commands(*calls, effect=Effect.ONCE), error) is Recovery.RAISE
    assert recovery_for(commands(*calls, effect=Effect.IDEMPOTENT), error) is Recovery.REDIAL
    ask = ReplyError("ASK 1 127.0.0.1:6381")
    assert recovery_for(commands(*calls, effect=Effect.IDEMPOTENT), ask) is Recovery.WAIT


def test_an_unknown_script_is_sent_whole() -> None:
    source = b"return KEYS[1]"
    script = Script("s", source, hashlib.sha1(source).hexdigest().encode())
    request = call(script, [b"key"], [b"$7\r\nEVALSHA\r\n"], Effect.READ)
    before = request.frame
    assert recovery_for(request, ReplyError("NOSCRIPT No matching script.")) is Recovery.LOAD
    expected = commands(("EVAL", source, 1, b"key", b"$7\r\nEVALSHA\r\n"), effect=Effect.READ)
    assert request.frame == expected.frame != before
    assert recovery_for(request, ReplyError("NOSCRIPT No matching script.")) is Recovery.RAISE
    assert recovery_for(get(), ReplyError("NOSCRIPT No matching script.")) is Recovery.RAISE


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
    assert type(error_for_lost(request, ENDPOINT)) is UnreachableError
    request.refusal = ReplyError("LOADING Redis is loading")
    told = error_for_lost(request, ENDPOINT)
    assert isinstance(told, ServerError)
    assert told.code == "LOADING"
    request.is_in_doubt = True
    unknown = effect is not Effect.READ
    assert isinstance(error_for_lost(request, ENDPOINT), OutcomeUnknownError) == unknown


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
    assert meaning_of(inner) is Recovery.RAISE


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
