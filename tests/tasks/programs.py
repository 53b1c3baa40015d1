"""Tasks of a module, as processes and pickles need them. The tests say where the server is."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from decimal import Decimal
from typing import Any

from chasqui import App


@asynccontextmanager
async def lifespan() -> AsyncIterator[str]:
    yield "made"


app: App[str] = App("programs", lifespan=lifespan)


@app.task(processes=1)
def where(day: date) -> tuple[int, date]:
    return os.getpid(), day


@app.task(processes=1)
def in_process(what: str) -> Decimal:
    if what == "context":
        print(app.context)
    if what == "raise":
        raise LookupError("in the process")
    return "wrong" if what == "wrong" else Decimal("1.50")  # type: ignore[return-value]


@app.task
def plain(day: date, n: int = 1) -> Any:
    return day, n


nameless = app.task(name="nameless")(lambda x: x)
