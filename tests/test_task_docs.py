"""The samples of docs/tasks.md and docs/frameworks.md run as they stand."""

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from litestar import Litestar
from litestar.testing import TestClient as LitestarClient
from starlette.testclient import TestClient

from chasqui import sync
from tests.servers import Server

ROOT = Path(__file__).parent.parent


def samples(page: str) -> dict[str, list[str]]:
    """The Python samples of a page, by the headings that they stand under."""
    found: dict[str, list[str]] = {}
    parts = re.split(r"^#+ (.+)\n", (ROOT / "docs" / page).read_text(), flags=re.M)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        if blocks := re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
            found[heading] = blocks
    return found


FRAMEWORKS = samples("frameworks.md")
LOGGING = ("logging", "structlog", "Sentry")
((SHOP,),) = [blocks for heading, blocks in FRAMEWORKS.items() if heading.startswith("Frameworks")]
WEB = [one for one in FRAMEWORKS if one not in LOGGING and not one.startswith("Frameworks")]


@pytest.fixture
def load(
    tmp_path: Path, valkey_9: Server, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], ModuleType]]:
    """Saves a module and imports it. Its server and queues are the test's."""
    monkeypatch.setenv("CHASQUI_URL", valkey_9.url)
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def give(name: str, source: str) -> ModuleType:
        for known in ("shop", "default", "urgent"):
            source = source.replace(f'"{known}"', f'"{known}-{queue_name}"')
        (tmp_path / f"{name}.py").write_text(source)
        names.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield give
    for name in names:
        sys.modules.pop(name, None)


async def test_the_page_of_tasks_is_one_program(load: Callable[[str, str], ModuleType]) -> None:
    page = load("shop", "\n\n".join(block for of in samples("tasks.md").values() for block in of))
    groups = [page.app.worker_group(), page.bank.worker_group()]
    running = [asyncio.ensure_future(group.run()) for group in groups]
    try:
        assert await page.enqueueing() == "welcomed Ada"
        assert await asyncio.to_thread(page.enqueueing_without_a_loop) == "cat.png at 200"
        assert await page.enqueueing_many() == ["0.png at 200", "1.png at 200", "2.png at 200"]
        assert await page.later() == "cat.png at 200"
        assert await page.once() == [True, False]
        assert await page.failing() == "charged in run 2 of 5; unrecoverable"
        assert await page.job_of_an_old_program() == "en: Ada"
        assert await page.flows() == [4, "total: 19", 0]
        assert await (await page.alarm.enqueue("fire")).result() == "fire"
        assert await (await page.statement.enqueue("7")).result() == "7"
        keys = {one.key for one in await page.app.queue().get_repeatable_jobs()}
        assert keys == {"task:clean_up", "task:morning_report"}
    finally:
        for group in groups:
            await group.close()
        await asyncio.gather(*running)
        for app in (page.app, page.bank):
            await app.close()
            app.close_sync()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tasks.md", "frameworks.md"])
def test_the_samples_pass_mypy(page: str, tmp_path: Path) -> None:
    if page == "tasks.md":
        blocks = [block for of in samples(page).values() for block in of]
        (tmp_path / "shop.py").write_text("\n\n".join(blocks))
    else:
        (tmp_path / "shop.py").write_text(SHOP)
        for i, heading in enumerate([*WEB, *LOGGING]):
            (tmp_path / f"sample_{i}.py").write_text(FRAMEWORKS[heading][0])
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *map(str, tmp_path.glob("*.py"))],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("heading", WEB)
def test_a_web_application_of_the_page_enqueues(
    heading: str, load: Callable[[str, str], ModuleType], valkey_9: Server
) -> None:
    shop = load("shop", SHOP)
    api = load("api", FRAMEWORKS[heading][0]).api
    client: Any = LitestarClient(api) if isinstance(api, Litestar) else TestClient(api)
    with client:
        answers = [client.post("/users/ann")]
        if heading == "FastAPI":
            answers.append(client.post("/imports/ann"))
    assert [one.status_code for one in answers] == [202] * len(answers)
    with sync.Queue(shop.app.default_queue, redis_url=valkey_9.url) as queue:
        assert queue.counts().waiting == len(answers)


def run_in_process(folder: Path, heading: str, url: str, call: str) -> tuple[str, str]:
    """Run a sample, and one job of it; what it printed to stdout and stderr."""
    (folder / "shop.py").write_text(SHOP)
    (folder / "sample.py").write_text(FRAMEWORKS[heading][0])
    source = f"""
import asyncio, sample
async def main():
    {call}
    await sample.app.worker_group(burst=True).run()
    await sample.app.close()
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        cwd=folder,
        env={**os.environ, "CHASQUI_URL": url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_the_logging_of_the_page(tmp_path: Path, private_server: Callable[..., Server]) -> None:
    url = private_server("valkey-9").url
    _, err = run_in_process(tmp_path, "logging", url, "await sample.pay.enqueue(5)")
    assert re.search(r"^INFO \[- -\] outside of a run", err, re.M)
    assert re.search(r"^INFO \[pay \w{26}\] paid 5$", err, re.M)


@pytest.mark.slow
def test_the_structlog_of_the_page(tmp_path: Path, private_server: Callable[..., Server]) -> None:
    url = private_server("valkey-9").url
    out, _ = run_in_process(tmp_path, "structlog", url, "await sample.pay.enqueue(5)")
    outside, inside = map(json.loads, out.splitlines())
    assert outside == {"event": "outside of a run", "level": "info"}
    assert len(inside.pop("job_id")) == 26
    assert inside == {
        "event": "paid", "amount": 5, "level": "info", "job_name": "pay", "attempt": 1,
        "queue": "shop",
    }  # fmt: skip


def test_the_sentry_of_the_page(load: Callable[[str, str], ModuleType]) -> None:
    import sentry_sdk

    with sentry_sdk.isolation_scope():
        page = load("page", FRAMEWORKS["Sentry"][0])
        sentry_sdk.get_global_scope().set_client(None)
    assert [type(hook).__name__ for hook in page.app.around] == ["SentryHook"]
