"""A task that runs in a process and shows what a log handler there saw."""

import logging
import os

from chasqui import App
from chasqui.integrations.logging import JobFields

app = App(os.environ.get("TEST_QUEUE", "none"), redis_url=os.environ.get("TEST_URL"))


@app.task(processes=1)
def fields() -> list[str | int]:
    record = logging.makeLogRecord({"name": "shop", "msg": "hi"})
    assert JobFields().filter(record)
    seen = vars(record)
    return [seen["job_id"], seen["job_name"], seen["attempt"], seen["queue"]]
