"""What a server's greeting tells, without a server: versions with holes are warned of."""

import logging

import pytest

from chasqui.model.config import Endpoint
from chasqui.transport import server
from chasqui.transport.handshake import Handshake
from chasqui.transport.request import Effect, commands

UNSAFE = {
    "redis": "2.8.24 5.0.14 6.0.20 6.2.19 7.0.15 7.2.10 7.2.13 7.4.5 7.4.8 8.0.0 8.0.3 8.2.2 8.2.5 "
    "8.4.0 8.4.2 8.6.2",
    "valkey": "7.2.4 7.2.10 8.0.5 8.1.3 8.1.6 9.0.3",
}
SAFE = {
    "redis": "6.2.20 6.2.22 7.2.14 7.4.9 8.0.4 8.2.6 8.4.3 8.6.3 8.8.0 255.255.255 0.0.0",
    "valkey": "7.2.11 8.0.6 8.1.7 9.0.4 9.1.0 9.1.2 10.0.0",
    "a-fork": "1.0.0 7.2.0",
}


def versions(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, version) for name, all_of_it in table.items() for version in all_of_it.split()]


def greet(name: str, version: str) -> server.ServerProfile:
    """Shake hands with a server that says it is this one."""
    talk = Handshake("c", None).talk(Endpoint.parse("redis://ada:pw@host"))
    hello = commands(("HELLO", 3, "AUTH", "ada", "pw", "SETNAME", "c"), effect=Effect.READ)
    assert next(talk).frame == hello.frame
    talk.send({b"server": name.encode(), b"version": version.encode()})
    with pytest.raises(StopIteration) as stop:
        talk.send([b"OK", b"OK", [None, None]])
    profile = stop.value.value
    assert isinstance(profile, server.ServerProfile)
    return profile


@pytest.fixture(autouse=True)
def _nobody_was_warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(server, "_warned", set())
    caplog.set_level(logging.DEBUG, "chasqui")


@pytest.mark.parametrize(("name", "version"), versions(UNSAFE))
def test_a_version_with_holes_is_warned_of_once(
    name: str, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert "upgrade to" in greet(name, version).advice
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{name} {version} has known holes")


def test_each_version_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for version in ("6.2.1", "6.2.2", "6.2.1"):
        greet("redis", version)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("name", "version"), versions(SAFE))
def test_a_version_without_known_holes_is_not(
    name: str, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert greet(name, version).advice == ""
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "version", "wanted"),
    [("redis", "6.0.20", "6.2.20"), ("redis", "7.0.15", "7.2.14"), ("valkey", "8.1.0", "8.1.7")],
)
def test_the_advice_is_the_nearest_release_that_is_safe(
    name: str, version: str, wanted: str
) -> None:
    assert greet(name, version).advice.endswith(f"upgrade to {wanted} or newer")
