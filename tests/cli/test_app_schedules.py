"""`chasqui doctor --app`: schedules that no task has any more."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chasqui import sync
from tests.cli.conftest import call
from tests.servers import Server

APP = """
from chasqui import App

app = App({queue!r})

@app.task(every=60)
async def digest() -> None:
    pass
"""


@pytest.fixture
def shop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue_name: str
) -> Iterator[sync.Queue | str]:
    (tmp_path / "doctored_shop.py").write_text(APP.format(queue=queue_name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "doctored_shop:app"
    sys.modules.pop("doctored_shop", None)


def test_a_schedule_that_left_the_code_is_a_risk(
    server: Server, queue_name: str, shop: str
) -> None:
    every = {"kind": "every", "interval_ms": 60_000}
    with sync.Queue(queue_name, redis_url=server.url) as queue:
        queue.upsert_repeatable_job("digest", {}, repeat=every, key="task:digest")
        queue.upsert_repeatable_job("by hand", {}, repeat=every)
        done = call("doctor", "--app", shop, url=server.url)
        assert not [row for row in done.rows if row[1] == "schedule"]
        queue.upsert_repeatable_job("gone", {}, repeat=every, key="task:gone")
    done = call("doctor", "--app", shop, url=server.url)
    [row] = [row for row in done.rows if row[1] == "schedule"]
    assert row[0] == "RISK"
    assert row[2] == f"task:gone of queue {queue_name} has no task in the app"
    assert row[3].endswith(f"chasqui repeatable remove {queue_name} task:gone")
    assert done.code == 1


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("doctored_shop:ap", "module 'doctored_shop' has no 'ap': is it 'app'?"),
        ("doctored_shop:App", "is no App"),
        ("doctored_shp:app", "there is no module 'doctored_shp'"),
    ],
)
@pytest.mark.usefixtures("shop")
def test_a_wrong_app_is_told(valkey_9: Server, target: str, told: str) -> None:
    done = call("doctor", "--app", target, url=valkey_9.url)
    assert done.code == 2
    assert told in done.err
