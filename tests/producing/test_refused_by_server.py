"""Servers that cannot be reached, or take no jobs: a typed error, and nothing is half added."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import redis as redis_py

from chasqui.errors import AuthenticationError, ServerError, UnreachableError
from chasqui.model.job import RepeatPattern
from chasqui.model.keys import Keys
from tests.proxy import Proxy
from tests.servers import Server

MIXED = [
    {"name": "n", "data": 1, "delay_ms": 60_000},
    {"name": "n", "data": 2, "job_id": "mine"},
    {"name": "n", "data": 3},
]


async def test_an_unreachable_host(queue_at: Callable[..., Any]):
    queue = queue_at("redis://127.0.0.1:1", request_timeout_s=5)
    for call in (
        lambda: queue.add("n", 1),
        lambda: queue.add_bulk([{"name": "n", "data": 1}] * 999),
    ):
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1"):
            await call()


async def test_a_server_that_never_answers(
    queue_at: Callable[..., Any], make_proxy: Callable[[str], Proxy], server: Server
):
    proxy = make_proxy(server.url)
    proxy.stall()
    queue = queue_at(proxy.url, request_timeout_s=0.3)
    with pytest.raises(UnreachableError):
        await queue.add("n", 1)
    proxy.resume()


@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
async def test_a_wrong_password_is_never_shown(
    kind: str,
    queue_at: Callable[..., Any],
    private_server: Callable[..., Server],
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.DEBUG)
    server = private_server(kind, requirepass="right")
    for who in (":hunter2@", "ada:hunter2@"):
        queue = queue_at(server.url.replace("//", f"//{who}"))
        with pytest.raises(AuthenticationError) as caught:
            await queue.add("n", 1)
        for text in (str(caught.value), repr(caught.value), repr(queue), caplog.text):
            assert "hunter2" not in text
    with pytest.raises(AuthenticationError):
        await queue_at(server.url).add("n", 1)
    assert (await queue_at(server.url.replace("//", "//:right@")).add("n", 1)).is_new


@pytest.mark.fault(21)
@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
async def test_a_server_without_memory(
    kind: str, queue_at: Callable[..., Any], private_server: Callable[..., Server], keys: Keys
):
    server = private_server(kind)
    queue = queue_at(server.url)
    with redis_py.Redis.from_url(server.url) as redis:
        await queue.add_bulk(MIXED[2:])
        await queue.upsert_repeatable_job("n", 1, repeat=RepeatPattern.every(60_000))
        redis.config_set("maxmemory", "1")
        for call in (
            lambda: queue.add("n", 1),
            lambda: queue.add("n", 1, job_id="mine"),
            lambda: queue.add_bulk(MIXED),
            lambda: queue.add_bulk(MIXED[2:] * 600),
            lambda: queue.add_bulk(MIXED * 200),
            lambda: queue.upsert_repeatable_job("m", 1, repeat=RepeatPattern.every(60_000)),
        ):
            with pytest.raises(ServerError) as caught:
                await call()
            assert caught.value.code == "OOM"
        redis.config_set("maxmemory", "0")
        assert (redis.xlen(keys.stream), redis.zcard(keys.delayed)) == (1, 0)
        assert redis.zcard(keys.repeat) == 1
        assert [job.is_new for job in await queue.add_bulk(MIXED)] == [True, True, True]


@pytest.mark.fault(28)
@pytest.mark.parametrize("name", ["stream", "delayed"])
async def test_a_key_of_another_type(name: str, queue: Any, redis: redis_py.Redis, keys: Keys):
    redis.set(getattr(keys, name), "not ours")
    with pytest.raises(ServerError) as caught:
        await queue.add_bulk(MIXED)
    assert caught.value.code == "WRONGTYPE"
    assert redis.exists(keys.stream, keys.delayed, keys.unique("mine")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis-8.6", "redis-6.2", "valkey-9"])
async def test_a_replica_takes_no_jobs(
    kind: str, queue_at: Callable[..., Any], private_server: Callable[..., Server], keys: Keys
):
    server = private_server(kind)
    with redis_py.Redis.from_url(server.url) as redis:
        redis.replicaof("127.0.0.1", 1)
        queue = queue_at(server.url, request_timeout_s=0.5)
        for call in (lambda: queue.add("n", 1), lambda: queue.add_bulk(MIXED)):
            with pytest.raises(ServerError) as caught:
                await call()
            assert caught.value.code == "READONLY"
        redis.replicaof("NO", "ONE")
        assert redis.exists(keys.stream, keys.delayed) == 0
