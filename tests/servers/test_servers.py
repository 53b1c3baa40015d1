"""The servers that all other tests stand on: found, fetched once, started, and surely ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from tests.servers import (
    KINDS,
    MissingServerError,
    RemoteServer,
    Server,
    ServerStartError,
    binaries,
    fetch,
    find,
    get,
    remote_servers,
    tool,
)
from tests.servers.kinds import REDIS_62, REDIS_86, VALKEY_9

ROOT = Path(__file__).parents[2]


def write_binary(path: Path, version: str) -> None:
    """An executable that says it is a server of this version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "Redis server v={version} sha=0:0 malloc=libc bits=64"\n')
    path.chmod(0o755)


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without servers: an empty cache, and a PATH with the returned folder alone."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(bin_folder))
    return bin_folder


def test_versions_are_compared_by_number() -> None:
    assert REDIS_62.accepts("6.2.14")
    assert VALKEY_9.accepts("9.1.2")
    assert not REDIS_86.accepts("8.60.0")
    assert not REDIS_86.accepts("8.0.6")


def test_binary_on_path_comes_first(empty_machine: Path) -> None:
    write_binary(empty_machine / "redis-server", "8.6.1")
    write_binary(binaries.cached(REDIS_86), "8.6.2")
    assert find("redis-8.6") == empty_machine / "redis-server"


def test_binary_on_path_of_another_version_is_passed_over(empty_machine: Path) -> None:
    write_binary(empty_machine / "redis-server", "7.0.15")
    write_binary(binaries.cached(REDIS_86), "8.6.2")
    assert find("redis-8.6") == binaries.cached(REDIS_86)


def test_missing_binary_says_how_to_get_it(empty_machine: Path) -> None:
    with pytest.raises(MissingServerError, match=r"no redis-6\.2 server.*`make servers` gets it"):
        find("redis-6.2")


def test_tools_are_those_that_came_with_the_server(empty_machine: Path) -> None:
    write_binary(binaries.cached(REDIS_86), "8.6.2")
    with pytest.raises(MissingServerError, match="no redis-benchmark"):
        tool("redis-8.6", "redis-benchmark")
    write_binary(binaries.cached(REDIS_86).with_name("redis-benchmark"), "8.6.2")
    assert tool("redis-8.6", "redis-benchmark").parent == binaries.cached(REDIS_86).parent


def test_many_who_get_at_once_fetch_once(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches: list[Path] = []
    abandoned = binaries.cache_directory() / "redis-8.6.abandoned"
    abandoned.mkdir(parents=True)
    everyone = threading.Barrier(8)

    def source(into: Path, report: Callable[[str], None]) -> None:
        fetches.append(into)
        write_binary(into / "redis-server", "8.6.2")

    def ask() -> Path:
        everyone.wait()
        return get("redis-8.6")

    monkeypatch.setitem(fetch._SOURCES, REDIS_86, source)
    with ThreadPoolExecutor(8) as pool:
        found = [future.result() for future in [pool.submit(ask) for _ in range(8)]]
    assert set(found) == {binaries.cached(REDIS_86)}
    assert len(fetches) == 1
    assert not abandoned.exists()


@pytest.mark.parametrize("version", ["8.4.0", None])
def test_unfit_binary_never_reaches_the_cache(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    def source(into: Path, report: Callable[[str], None]) -> None:
        if version is not None:
            write_binary(into / "redis-server", version)

    monkeypatch.setitem(fetch._SOURCES, REDIS_86, source)
    with pytest.raises(MissingServerError, match=version or "does not run here"):
        get("redis-8.6")
    assert [path.name for path in binaries.cache_directory().iterdir()] == ["redis-8.6.lock"]


def test_remote_servers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHASQUI_TEST_URLS", "a=redis://h:1/0?x=y, b=redis://h:2")
    assert remote_servers() == [
        RemoteServer("a", "redis://h:1/0?x=y"),
        RemoteServer("b", "redis://h:2"),
    ]
    monkeypatch.setenv("CHASQUI_TEST_URLS", "redis://h:1")
    with pytest.raises(ValueError, match="name=url"):
        remote_servers()


def test_server_answers_on_tcp_and_unix_socket(server: Server | RemoteServer) -> None:
    if isinstance(server, RemoteServer):
        pytest.skip("its unix socket is not ours to know")
    with redis.Redis.from_url(server.url) as tcp, redis.Redis.from_url(server.unix_url) as unix:
        assert tcp.info("server")["process_id"] == server.pid
        assert unix.info("server")["process_id"] == server.pid


def test_server_is_of_the_kind_asked_for(
    valkey_9: Server, redis_62: Server, redis_86: Server
) -> None:
    for server in (valkey_9, redis_62, redis_86):
        with redis.Redis.from_url(server.url) as client:
            info = client.info("server")
        version = info.get("valkey_version") or info["redis_version"]
        assert KINDS[server.name].accepts(version)


@pytest.mark.parametrize("end", [Server.stop, Server.kill])
def test_restart_keeps_port_and_data(
    private_server: Callable[..., Server], end: Callable[[Server], None]
) -> None:
    server = private_server(appendonly="yes", appendfsync="always")
    url, pid = server.url, server.pid
    with redis.Redis.from_url(url) as client:
        client.set("kept", "yes")
    end(server)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    server.restart()
    assert server.url == url
    assert server.pid != pid
    with redis.Redis.from_url(url) as client:
        assert client.get("kept") == b"yes"


def test_failed_start_shows_the_log_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.servers.process._base", lambda: tmp_path)
    with pytest.raises(ServerStartError, match="no-such-setting"):
        Server("valkey-9", no_such_setting="1")
    assert list(tmp_path.iterdir()) == []


def test_server_ends_with_its_process_even_by_sigkill(valkey_9: Server) -> None:
    program = (
        "from tests.servers import Server; print(Server('valkey-9').port, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            owner.send_signal(signal.SIGKILL)
            # The end of the server ends the connection; a reset if it had not yet accepted it.
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 error")])
def test_missing_server_skips_here_and_fails_in_ci(
    empty_machine: Path, ci: str, outcome: str
) -> None:
    test = f"{__file__}::test_server_ends_with_its_process_even_by_sigkill"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rsE", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env=os.environ | {"CI": ci},
        capture_output=True,
        text=True,
    )
    assert outcome in run.stdout
    assert "no valkey-9 server on this machine: `make servers` gets it" in run.stdout
