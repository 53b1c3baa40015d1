"""The tools of the other folders, in one place: servers, links, workers in and out of process."""

from tests.consuming.conftest import add_raw as add_raw
from tests.consuming.conftest import dead as dead
from tests.consuming.conftest import keys as keys
from tests.consuming.conftest import queue as queue
from tests.consuming.conftest import redis as redis
from tests.consuming.conftest import redis_at as redis_at
from tests.consuming.conftest import start as start
from tests.consuming.conftest import start_at as start_at
from tests.crash.conftest import fleet as fleet
from tests.crash.conftest import make_fleet as make_fleet
