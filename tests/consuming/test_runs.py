"""A run that was cancelled goes on until its end, whoever still waits for that."""

import asyncio
import gc
import weakref

import pytest

from chasqui.consuming.runs import run_with_timeout


class Token:
    """What a run has in hand."""


@pytest.mark.parametrize("limit_s", [0.001, 60])
async def test_a_run_that_ignores_its_end_is_kept_until_it_comes(limit_s: float):
    """Its time is over, or its slot is cancelled; then whoever waits for its end is cancelled."""
    held: list[weakref.ref[Token]] = []
    has_begun, was_told = asyncio.Event(), asyncio.Event()

    async def rude() -> None:
        token = Token()
        held.append(weakref.ref(token))
        has_begun.set()
        for _ in range(2):  # the second comes with the end of the loop
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                was_told.set()

    waiting = asyncio.ensure_future(run_with_timeout(limit_s, rude(), "q"))
    await has_begun.wait()
    if limit_s > 1:
        waiting.cancel()
    await was_told.wait()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    del waiting
    await asyncio.sleep(0)
    gc.collect()
    assert held[0]() is not None, "it was taken apart"
