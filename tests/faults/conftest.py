"""The tools of the other folders, in one place: servers, links, workers in and out of process."""

from tests.crash.conftest import fleet as fleet
from tests.crash.conftest import make_fleet as make_fleet
from tests.integration.conftest import connect as connect
from tests.integration.conftest import connect_blocking as connect_blocking
from tests.integration.conftest import make_proxy as make_proxy
from tests.integration.consuming.conftest import add_raw as add_raw
from tests.integration.consuming.conftest import dead as dead
from tests.integration.consuming.conftest import keys as keys
from tests.integration.consuming.conftest import queue as queue
from tests.integration.consuming.conftest import redis as redis
from tests.integration.consuming.conftest import redis_at as redis_at
from tests.integration.consuming.conftest import start as start
from tests.integration.consuming.conftest import start_at as start_at
