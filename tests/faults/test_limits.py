"""Processes without descriptors or memory, and processes that end in the middle of everything."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ledger import Census
from tests.servers import Server

ROOT = Path(__file__).parents[2]
#: How long a process may take to end; the control waits that long for one that does not.
END_S = 20.0
HANG_S = 2.0

PREAMBLE = """
import asyncio, logging, os, resource, signal, sys, threading
from chasqui import AuthenticationError, ChasquiError, Queue, Worker, sync
logging.getLogger("chasqui").setLevel("ERROR")  # it advises upgrades
logging.getLogger("asyncio").setLevel("ERROR")  # it tells of slow machines
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
url, name = sys.argv[1:]

def files():
    return len(os.listdir("/proc/self/fd"))

def next_file():
    # No descriptor is free below this one.
    number = os.dup(0)
    os.close(number)
    return number

async def handler(job):
    pass
"""


def run(body: str, server: Server, queue_name: str, limit_s: float = END_S) -> tuple[int, str]:
    """The exit code of a program, and what it printed."""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", PREAMBLE + body, server.url, queue_name],
        cwd=ROOT, capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


# ── Limits ──────────────────────────────────────────────────────────────────────────────────────

FILES_ASYNC = """
async def main():
    async with Queue(name, redis_url=url) as warm:
        await warm.add("n", None)
    before = files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_file(), hard))
    for _ in range(50):
        queue = Queue(name, redis_url=url)
        try:
            await queue.add("n", None)
            sys.exit("it had a descriptor")
        except ChasquiError as error:
            pass
        await queue.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    async with Queue(name, redis_url=url) as queue:
        await queue.add("n", None)
    await asyncio.sleep(0)
    if files() > before:
        sys.exit(f"{files() - before} descriptors leaked")
asyncio.run(main())
print("fine")
"""

FILES_SYNC = """
with sync.Queue(name, redis_url=url) as warm:
    warm.add("n", None)
before = files()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (next_file(), hard))
for _ in range(50):
    with sync.Queue(name, redis_url=url) as queue:
        try:
            queue.add("n", None)
            sys.exit("it had a descriptor")
        except ChasquiError:
            pass
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
with sync.Queue(name, redis_url=url) as queue:
    queue.add("n", None)
if files() > before:
    sys.exit(f"{files() - before} descriptors leaked")
print("fine")
"""

#: Ten descriptors, and fifty dials that end at the door.
DOOR_ASYNC = """
async def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_file() + 10, hard))
    for _ in range(50):
        async with Queue(name, redis_url=url.replace("//", "//nobody:wrong@")) as queue:
            try:
                await queue.add("n", None)
                sys.exit("it was let in")
            except AuthenticationError:
                pass
asyncio.run(main())
print("fine")
"""

DOOR_SYNC = """
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (next_file() + 10, hard))
for _ in range(50):
    with sync.Queue(name, redis_url=url.replace("//", "//nobody:wrong@")) as queue:
        try:
            queue.add("n", None)
            sys.exit("it was let in")
        except AuthenticationError:
            pass
print("fine")
"""

MEMORY = """
def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

with sync.Queue(name, redis_url=url) as queue:
    queue.add("n", None)
    data = ["x" * 1000] * 900
    jobs = [{"name": "n", "data": data}] * 500
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used() + (48 << 20), hard))
    try:
        queue.add_bulk(jobs)
        sys.exit("it had the memory")
    except (ChasquiError, MemoryError) as error:
        print(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    queue.add("n", None)
print("fine")
"""


@pytest.mark.fault(53)
@pytest.mark.parametrize("program", [FILES_ASYNC, FILES_SYNC], ids=["asyncio", "blocking"])
def test_without_descriptors_calls_fail_and_nothing_leaks(
    server: Server, queue_name: str, program: str
) -> None:
    assert run(program, server, queue_name) == (0, "fine\n")


@pytest.mark.fault(53)
@pytest.mark.parametrize("program", [DOOR_ASYNC, DOOR_SYNC], ids=["asyncio", "blocking"])
def test_a_few_descriptors_are_enough_for_any_number_of_failed_dials(
    server: Server, queue_name: str, program: str
) -> None:
    assert run(program, server, queue_name) == (0, "fine\n")


@pytest.mark.fault(53)
def test_without_memory_a_call_fails_and_the_next_one_works(
    server: Server, queue_name: str
) -> None:
    code, printed = run(MEMORY, server, queue_name)
    assert (code, printed.split()[-1]) == (0, "fine"), printed


#: What is switched off, in which program, and what that prints instead.
CARELESS = {
    "asyncio, the system's errors": (
        "from chasqui.transport import connection\n"
        "connection.dial_failure = lambda endpoint, error: error\n",
        FILES_ASYNC,
        "Too many open files",
    ),
    "blocking, the system's errors": (
        "from chasqui.transport import blocking\n"
        "blocking.dial_failure = lambda endpoint, error: error\n",
        FILES_SYNC,
        "Too many open files",
    ),
    "asyncio, links left open": (
        "from chasqui.transport.link import Link\nLink.abort = lambda self: None\n",
        DOOR_ASYNC,
        "Too many open files",
    ),
    "blocking, links left open": (
        "from chasqui.transport.blocking_link import BlockingLink\n"
        "BlockingLink.close = lambda self: None\n",
        DOOR_SYNC,
        "ResourceWarning: unclosed",  # nothing refers to it, so Python closes it
    ),
}


@pytest.mark.fault(53, control=True)
@pytest.mark.parametrize("how", CARELESS)
def test_a_dial_whose_failure_is_not_looked_after_is_caught(
    server: Server, queue_name: str, how: str
) -> None:
    off, program, said = CARELESS[how]
    ended = run(off + program, server, queue_name)
    assert ended != (0, "fine\n")
    assert said in ended[1]


# ── The end ─────────────────────────────────────────────────────────────────────────────────────

ENDS = {
    "queue left open": ("queue = sync.Queue(name, redis_url=url)\nqueue.add('n', None)\n", 0),
    "queue of a dead loop": (
        "queue = Queue(name, redis_url=url)\nasyncio.run(queue.add('n', None))\n",
        0,
    ),
    "exit beside a worker in a thread": (
        """
def work():
    asyncio.run(Worker(name, handler, redis_url=url).run())

async def handler(job):
    at_work.set()
    await asyncio.sleep(3600)

at_work = threading.Event()
threading.Thread(target=work, daemon=True).start()
with sync.Queue(name, redis_url=url) as queue:
    queue.add("n", None)
at_work.wait()
print("leaving", flush=True)
sys.exit(3)
""",
        3,
    ),
    "exit in a handler": (
        """
async def leave(job):
    sys.exit(5)

with sync.Queue(name, redis_url=url) as queue:
    queue.add("n", None)
asyncio.run(Worker(name, leave, redis_url=url).run())
""",
        5,
    ),
    "exit while calls wait": (
        """
async def main():
    queue = Queue(name, redis_url=url)
    await queue.add("n", None)
    calls = [asyncio.ensure_future(queue.add("n", None)) for _ in range(100)]
    await asyncio.sleep(0)
    sys.exit(7)

asyncio.run(main())
""",
        7,
    ),
}


@pytest.mark.fault(54)
@pytest.mark.parametrize("how", ENDS)
def test_the_interpreter_ends_without_a_hang_or_a_crash(
    server: Server, queue_name: str, how: str
) -> None:
    program, expected = ENDS[how]
    code, printed = run(program, server, queue_name)
    assert code == expected, printed
    for sign in ("Fatal", "Segmentation", "core dumped"):
        assert sign not in printed


@pytest.mark.fault(54)
def test_an_interrupt_ends_a_worker_in_order(server: Server, queue_name: str) -> None:
    """What runs is let to its end, and acknowledged."""
    program = """
async def main():
    interrupted = asyncio.current_task()

    async def handler(job):
        print("up", flush=True)
        while not interrupted.cancelling():
            await asyncio.sleep(0.01)
        for _ in range(100):  # the engine has been told by then
            await asyncio.sleep(0)
        print("done", flush=True)

    worker = Worker(name, handler, redis_url=url)
    async with Queue(name, redis_url=url) as queue:
        await queue.add("n", None)
    await worker.run()
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + program, server.url, queue_name],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        printed = process.stdout.read()
        assert process.wait(END_S) == -signal.SIGINT, printed
    assert printed.startswith("done\n")
    assert "Fatal" not in printed
    assert Census.take(server.url, queue_name).is_empty


@pytest.mark.fault(54, control=True)
def test_a_heartbeat_that_python_waits_for_is_a_hang(server: Server, queue_name: str) -> None:
    off = """
from chasqui.consuming.heartbeat import Heartbeat

def start(self, loop):
    self._loop = loop
    self._thread.daemon = False
    self._thread.start()

Heartbeat.start = start
"""
    program, _ = ENDS["exit beside a worker in a thread"]
    with subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + off + program, server.url, queue_name],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "leaving\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(HANG_S)
        finally:
            process.kill()
