"""Key names, byte for byte, and what is kept out of them."""

import dataclasses
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chasqui.model.keys import Keys, check_job_id, check_job_name, check_queue_name

QUEUE_CHARS = string.ascii_letters + string.digits + "._-:/"
queue_names = st.text(QUEUE_CHARS, min_size=1, max_size=200)
any_ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def test_the_keys_of_a_queue() -> None:
    keys = Keys("mail:eu/1")
    assert keys.stream == b"{chasqui:mail:eu/1}:stream"
    assert keys.delayed == b"{chasqui:mail:eu/1}:delayed"
    assert keys.dlq == b"{chasqui:mail:eu/1}:dlq"
    assert keys.events == b"{chasqui:mail:eu/1}:events"
    assert keys.repeat == b"{chasqui:mail:eu/1}:repeat"
    assert keys.promoter_lock == b"{chasqui:mail:eu/1}:promoter:lock"
    assert keys.scheduler_lock == b"{chasqui:mail:eu/1}:scheduler:lock"
    assert keys.paused == b"{chasqui:mail:eu/1}:paused"
    assert keys.result("é") == b"{chasqui:mail:eu/1}:result:\xc3\xa9"
    assert keys.dlid("a") == b"{chasqui:mail:eu/1}:dlid:a"
    assert keys.didx("a") == b"{chasqui:mail:eu/1}:didx:a"
    assert keys.unique("a") == b"{chasqui:mail:eu/1}:unique:a"
    assert keys.applied("p", 3) == b"{chasqui:mail:eu/1}:applied:p:3"
    assert keys.flags("p", 7) == b"{chasqui:mail:eu/1}:flags:p:7"
    assert keys.repeat_spec("j::every:5") == b"{chasqui:mail:eu/1}:repeat:spec:j::every:5"


def test_keys_are_values() -> None:
    keys = Keys("mail")
    assert keys == Keys("mail")
    assert keys != Keys("news")
    assert repr(keys) == "Keys(queue='mail')"
    with pytest.raises(dataclasses.FrozenInstanceError):
        keys.stream = b"other"  # type: ignore[misc]


@pytest.mark.fault(47)
@given(queue_names, queue_names, any_ids, any_ids)
def test_no_two_things_share_a_key(queue: str, other: str, job_id: str, other_id: str) -> None:
    def everything(name: str, some_id: str) -> list[bytes]:
        keys = Keys(name)
        fixed = [getattr(keys, field.name) for field in dataclasses.fields(keys)[1:-1]]
        makers = (keys.result, keys.dlid, keys.didx, keys.unique, keys.repeat_spec)
        return fixed + [make(some_id) for make in makers]

    here = everything(queue, job_id)
    assert len(set(here)) == len(here)
    if queue != other:
        assert not set(here) & set(everything(other, other_id))


@given(queue_names)
def test_a_queue_name_out_of_the_alphabet_is_taken(name: str) -> None:
    assert check_queue_name(name) == name


@pytest.mark.fault(47)
@given(queue_names, st.characters(exclude_characters=QUEUE_CHARS), queue_names)
def test_one_foreign_character_spoils_a_queue_name(head: str, bad: str, tail: str) -> None:
    with pytest.raises(ValueError, match="queue name"):
        Keys(head[:90] + bad + tail[:90])


@pytest.mark.fault(47)
@pytest.mark.parametrize("name", ["", "x" * 201, "mail\n", "{x}", "a*", "a?b", "[a]", "a b", "ä"])
def test_bad_queue_names(name: str) -> None:
    with pytest.raises(ValueError, match="queue name must be 1 to 200 characters"):
        Keys(name)


def test_a_queue_name_is_a_str() -> None:
    with pytest.raises(TypeError, match="queue name must be a str, got bytes"):
        Keys(b"mail")  # type: ignore[arg-type]


@pytest.mark.parametrize("job_id", ["a", "user:42", "x" * 256, "é" * 128, "a b", " padded "])
def test_good_job_ids(job_id: str) -> None:
    assert check_job_id(job_id) == job_id


@pytest.mark.parametrize(
    ("job_id", "message"),
    [
        ("", "non-empty"),
        (" \t", "non-empty"),
        (None, "non-empty"),
        (5, "non-empty"),
        ("a{b", "braces"),
        ("y}:stream", "braces"),
        ("a\nb", "control characters"),
        ("a\x00b", "control characters"),
        ("a\x85b", "control characters"),
        ("a\u2028b", "control characters"),
        ("x" * 257, "256 bytes"),
        ("é" * 129, "256 bytes"),
        ("\ud800", "surrogate"),
    ],
)
def test_bad_job_ids(job_id: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_job_id(job_id)


def test_what_is_refused_is_shown_short() -> None:
    with pytest.raises(ValueError, match="braces") as caught:
        check_job_id("{" + "x" * 5000)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("name", ["", "mail", "{any} \n thing", "x" * 256, "é" * 128])
def test_good_job_names(name: str) -> None:
    assert check_job_name(name) == name


def test_bad_job_names() -> None:
    for name in ("x" * 257, "é" * 129):
        with pytest.raises(ValueError, match="name takes more than 256 bytes"):
            check_job_name(name)
    with pytest.raises(ValueError, match="surrogate"):
        check_job_name("\udc00")
    with pytest.raises(TypeError, match="name must be a str, got int"):
        check_job_name(5)
