"""What the Spark tests share. Most drive readers and writers directly, without a JVM.

Without the spark extra only `test_environment.py` is collected, which says so in one line.
"""

import importlib.util
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.servers import MissingServerError, Server

HAS_EXTRA = all(importlib.util.find_spec(name) for name in ("pyspark", "pandas", "pyarrow"))
collect_ignore_glob: list[str] = []
if not HAS_EXTRA:
    collect_ignore_glob.append("test_[!e]*.py")

#: The servers that the pipeline is promised to run on.
SERVERS = ("redis-8.6", "valkey-9")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.slow)
            # Of Spark and of what it imports, not of ours.
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
            if "spark" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(300))


def unavailable(reason: str) -> NoReturn:
    """Skip, with the reason in one line; in CI that is an error."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session", params=SERVERS)
def each_server(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> Server:
    """Each server that the pipeline is promised to run on."""
    return shared_server(request.param)


@pytest.fixture(autouse=True)
def _close_what_was_opened() -> Iterator[None]:
    yield
    if HAS_EXTRA:
        from tests.spark.direct import OPENED

        while OPENED:
            OPENED.pop()()


@pytest.fixture(scope="session")
def locked_server() -> Iterator[tuple[str, str]]:
    """A server with a password: the environment variable that holds its URL, and the password.

    Set before the JVM starts: its workers get the environment as it is then.
    """
    password = f"canary-{uuid.uuid4().hex}"
    try:
        server = Server("redis-8.6", requirepass=password)
    except MissingServerError as error:
        unavailable(str(error))
    with server:
        variable = "CHASQUI_TEST_SECRET_URL"
        os.environ[variable] = server.url.replace("://", f"://:{password}@")
        yield variable, password
        del os.environ[variable]


@pytest.fixture(scope="session")
def spark(locked_server: tuple[str, str]) -> Iterator[Any]:
    """One session for the run: two cores, and tasks may fail three times."""
    from chasqui.errors import NotSupportedError
    from chasqui.spark import session

    variable, _ = locked_server
    from chasqui.spark.sessions import find_java

    try:
        find_java()
    except NotSupportedError as error:
        unavailable(str(error))
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (root, os.environ.get("PYTHONPATH", "")))
    )
    running = session(
        "local[2,4]",
        app_name="chasqui-tests",
        conf={
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.streaming.pollingDelay": "10ms",
            "spark.driver.memory": "1g",
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
            # As on a cluster; a name with "secret" in it is what Spark's own pages hide.
            f"spark.executorEnv.{variable}": os.environ[variable],
        },
    )
    running.sparkContext.setLogLevel("OFF")
    yield running
    running.stop()
