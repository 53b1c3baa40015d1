"""URLs: what they name, and what is refused before anything is dialled or started."""

import pytest

from chasqui.model.config import Endpoint


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("embedded://", None),
        ("embedded:///some/dir", "/some/dir"),
        ("embedded:///some%20dir", "/some dir"),
        ("EMBEDDED:///some/dir", "/some/dir"),
    ],
)
def test_the_directory_of_an_embedded_server(url: str, path: str | None) -> None:
    assert (Endpoint.parse(url).kind, Endpoint.parse(url).path) == ("embedded", path)


@pytest.mark.parametrize(
    "url", ["embedded://some/dir", "embedded:///", "embedded:////", "embedded:///d?x=1"]
)
def test_a_directory_that_was_not_meant_is_never_used(url: str) -> None:
    """Of `some/dir` the rest would be `/dir`, and `/` is nobody's."""
    with pytest.raises(ValueError, match="names no embedded server"):
        Endpoint.parse(url)


@pytest.mark.parametrize("url", ["unix://", "unix:///", "unix://run/redis.sock"])
def test_a_socket_needs_its_whole_path(url: str) -> None:
    with pytest.raises(ValueError, match="needs the path of a socket"):
        Endpoint.parse(url)


def test_credentials_of_a_socket() -> None:
    endpoint = Endpoint.parse("unix://ada:secret@/run/redis.sock?db=3")
    assert (endpoint.path, endpoint.username, endpoint.db) == ("/run/redis.sock", "ada", 3)
    assert "secret" not in f"{endpoint} {endpoint!r}"


def test_one_database_at_most() -> None:
    assert Endpoint.parse("redis://h/2").db == Endpoint.parse("redis://h?db=2").db == 2
    with pytest.raises(ValueError, match="names two databases"):
        Endpoint.parse("redis://h/2?db=3")


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_host_that_nobody_can_look_up(host: str) -> None:
    with pytest.raises(ValueError, match="a host that is no name"):
        Endpoint.parse(f"redis+sentinel://h,{host}:26379/main")


@pytest.mark.parametrize(
    "url",
    [
        "redis://:?secret=1@h",  # a ? that should be %3F
        "redis://:#secret@h",
        "redis://:[secret@h",
        "embedded://:[secret@[::1]/dir",
        "redis+sentinel://h?sentinel_password=a&secret",  # a & that should be %26
        "redis+sentinel://h?sentinel_password=a&secret=1",
        "redis+sentinel://h?sentinel_password=a#secret",
        "redis+sentinel://h?sentinel_password=a@secret",
        "redis://h?sentinel_password=secret",
        "redis+cluster://h?sentinel_username=ada&sentinel_password=secret",
    ],
)
def test_what_may_be_part_of_a_password_is_not_quoted(url: str) -> None:
    with pytest.raises(ValueError, match="redis_url") as caught:
        Endpoint.parse(url)
    assert "secret" not in str(caught.value)


def test_credentials_for_the_sentinels_themselves() -> None:
    login = "sentinel_username=ada&sentinel_password=%26secret+%2B"
    endpoint = Endpoint.parse(f"redis+sentinel://eve:other@h:1,i:2/name/3?{login}")
    assert endpoint.sentinel_password is not None
    assert endpoint.sentinel_password.reveal() == "&secret++"
    assert (endpoint.sentinel_username, endpoint.username, endpoint.db) == ("ada", "eve", 3)
    assert "secret" not in f"{endpoint} {endpoint!r}"
    found = endpoint.at("h", 1)  # which is none of them
    assert (found.sentinel_username, found.sentinel_password) == (None, None)
    assert (found.username, found.password) == (endpoint.username, endpoint.password)
