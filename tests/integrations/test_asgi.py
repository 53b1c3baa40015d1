"""Web applications that enqueue: FastAPI, Starlette and Litestar, each with its own test client."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import litestar
import pytest
from fastapi import FastAPI
from litestar import Litestar
from litestar.params import FromPath
from litestar.testing import TestClient as LitestarClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from chasqui import App, sync
from tests.servers import Server


class Shop:
    """An app with one task, and the queues that its endpoints used."""

    def __init__(self, queue: str, url: str) -> None:
        self.app = App(queue, redis_url=url)

        @self.app.task
        async def welcome(to: str) -> str:
            return f"welcome, {to}"

        self.welcome = welcome
        self.used: list[Any] = []

    async def on_loop(self, to: str) -> str:
        self.used.append(self.app.queue())
        return (await self.welcome.enqueue(to)).id

    def in_thread(self, to: str) -> str:
        self.used.append(self.app.sync_queue())
        return self.welcome.enqueue_sync(to).id


@pytest.fixture
def shop(valkey_9: Server, queue_name: str) -> Shop:
    return Shop(queue_name, valkey_9.url)


def of_fastapi(shop: Shop, lifespan: Any) -> AbstractContextManager[Any]:
    api = FastAPI(lifespan=lifespan)

    @api.post("/async/{to}")
    async def asynchronous(to: str) -> str:
        return await shop.on_loop(to)

    @api.post("/sync/{to}")
    def synchronous(to: str) -> str:
        return shop.in_thread(to)

    return TestClient(api)


def of_starlette(shop: Shop, lifespan: Any) -> AbstractContextManager[Any]:
    async def asynchronous(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await shop.on_loop(request.path_params["to"]))

    def synchronous(request: Request) -> PlainTextResponse:
        return PlainTextResponse(shop.in_thread(request.path_params["to"]))

    routes = [
        Route("/async/{to}", asynchronous, methods=["POST"]),
        Route("/sync/{to}", synchronous, methods=["POST"]),
    ]
    return TestClient(Starlette(routes=routes, lifespan=lifespan))


def of_litestar(shop: Shop, lifespan: Any) -> AbstractContextManager[Any]:
    @litestar.post("/async/{to:str}")
    async def asynchronous(to: FromPath[str]) -> str:
        return await shop.on_loop(to)

    @litestar.post("/sync/{to:str}", sync_to_thread=True)
    def synchronous(to: FromPath[str]) -> str:
        return shop.in_thread(to)

    return LitestarClient(Litestar([asynchronous, synchronous], lifespan=[lifespan]))


FRAMEWORKS = pytest.mark.parametrize(
    "client_of", [of_fastapi, of_starlette, of_litestar], ids=["fastapi", "starlette", "litestar"]
)
ClientOf = Callable[[Shop, Any], AbstractContextManager[Any]]


def added(shop: Shop, url: str) -> int:
    with sync.Queue(shop.app.default_queue, redis_url=url) as queue:
        return queue.counts().waiting


@FRAMEWORKS
def test_endpoints_enqueue_and_the_end_closes_the_queues(
    shop: Shop, valkey_9: Server, client_of: ClientOf
) -> None:
    with client_of(shop, shop.app.asgi) as client:
        answers = [client.post(f"/{kind}/ann") for kind in ("async", "sync", "async")]
        assert [one.is_success for one in answers] == [True] * 3
        assert len({one.text for one in answers}) == 3
        assert shop.used[0] is shop.used[2], "one queue for all requests"
        assert not any(queue.is_closed for queue in shop.used)
    assert added(shop, valkey_9.url) == 3
    assert all(queue.is_closed for queue in shop.used)


@FRAMEWORKS
def test_it_goes_into_a_lifespan_of_ones_own(
    shop: Shop, valkey_9: Server, client_of: ClientOf
) -> None:
    states: list[str] = []

    @asynccontextmanager
    async def lifespan(api: object) -> AsyncIterator[None]:
        async with shop.app.asgi(api):
            states.append("up")
            yield
            states.append(f"down, open: {not shop.used[0].is_closed}")

    with client_of(shop, lifespan) as client:
        assert client.post("/async/ann").is_success
        assert states == ["up"]
    assert states == ["up", "down, open: True"]
    assert shop.used[0].is_closed


@FRAMEWORKS
def test_an_application_starts_again(shop: Shop, valkey_9: Server, client_of: ClientOf) -> None:
    for _ in range(2):
        with client_of(shop, shop.app.asgi) as client:
            assert client.post("/async/ann").is_success
            assert client.post("/sync/ann").is_success
    assert added(shop, valkey_9.url) == 4
    assert all(queue.is_closed for queue in shop.used)


def test_it_needs_no_server_to_start(queue_name: str) -> None:
    shop = Shop(queue_name, "redis://127.0.0.1:1")
    with of_fastapi(shop, shop.app.asgi) as client:
        assert client.get("/openapi.json").is_success  # type: ignore[attr-defined]
