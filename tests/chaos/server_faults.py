"""Faults of the server: killed, restarted, slow, full, busy, demoted; and what operators do."""

import contextlib
import os
import signal
import threading

import redis

from tests.chaos.scene import Scene, fault


@fault("server killed", general=True)
def kill_server(scene: Scene) -> None:
    with scene.server(), scene.outage(*scene.stage.workers):
        scene.stage.server.kill()
        scene.last(0, 1.5)
        scene.stage.server.start()


@fault("server killed during an AOF rewrite", general=True)
def kill_in_rewrite(scene: Scene) -> None:
    with scene.server(), scene.outage(*scene.stage.workers):
        scene.stage.ask(lambda client: client.bgrewriteaof())
        scene.last(0, 0.1)
        scene.stage.server.kill()
        scene.stage.server.start()


@fault("server restarted", general=True)
def restart_server(scene: Scene) -> None:
    with scene.server(), scene.outage(*scene.stage.workers):
        scene.stage.server.restart()


@fault("server stopped for a while", general=True)
def freeze_server(scene: Scene) -> None:
    """No packet comes back and no link is cut."""
    with scene.server(), scene.outage(*scene.stage.workers):
        pid = scene.stage.server.pid
        os.kill(pid, signal.SIGSTOP)
        scene.last(0.3, scene.lease_s * 1.2)
        os.kill(pid, signal.SIGCONT)


@fault("CLIENT KILL TYPE normal", general=True)
def kill_clients(scene: Scene) -> None:
    with scene.server():
        scene.stage.ask(lambda client: client.client_kill_filter(_type="normal", skipme=True))


@fault("no more clients")
def max_clients(scene: Scene) -> None:
    """All links are gone and new ones are refused, but for the operator's."""
    with scene.server(), scene.outage(*scene.stage.workers):
        operator = redis.Redis.from_url(scene.stage.server.url, single_connection_client=True)
        with operator:
            old = operator.config_get("maxclients")["maxclients"]
            operator.config_set("maxclients", 1)
            operator.client_kill_filter(_type="normal", skipme=True)
            scene.last(0.3, 2.0)
            operator.config_set("maxclients", old)


@fault("SCRIPT FLUSH")
def script_flush(scene: Scene) -> None:
    with scene.server():
        for _ in range(10):
            scene.stage.ask(lambda client: client.script_flush())
            scene.last(0.02, 0.1)


@fault("DEBUG SLEEP")
def debug_sleep(scene: Scene) -> None:
    with scene.server(), scene.outage(*scene.stage.workers):
        while_s = scene.random.uniform(0.3, scene.lease_s * 1.2)
        scene.stage.ask(lambda client: client.execute_command("DEBUG", "SLEEP", while_s))


@fault("CLIENT PAUSE WRITE")
def client_pause(scene: Scene) -> None:
    with scene.server(), scene.outage(*scene.stage.workers):
        while_s = scene.random.uniform(0.3, scene.lease_s * 1.2)
        scene.stage.ask(lambda client: client.client_pause(int(while_s * 1000), all=False))
        scene.last(while_s, while_s)


@fault("busy script")
def busy_script(scene: Scene) -> None:
    """An endless script of somebody else, until an operator kills it."""
    with scene.server(), scene.outage(*scene.stage.workers):
        scene.stage.ask(lambda client: client.config_set("lua-time-limit", 20))
        with redis.Redis.from_url(scene.stage.server.url) as client:

            def spin() -> None:
                with contextlib.suppress(redis.RedisError):
                    client.eval("while true do end", 0)

            spinner = threading.Thread(target=spin)
            spinner.start()
            scene.last(0.3, 2.0)
            while spinner.is_alive():
                with contextlib.suppress(redis.RedisError):
                    scene.stage.client.script_kill()
                spinner.join(0.05)


@fault("out of memory")
def out_of_memory(scene: Scene) -> None:
    with scene.server():
        scene.stage.ask(lambda client: client.config_set("maxmemory", 1_000_000))
        scene.last(0.3, 2.0)
        scene.stage.ask(lambda client: client.config_set("maxmemory", 0))


@fault("group destroyed")
def group_destroyed(scene: Scene) -> None:
    with scene.server():
        scene.destroy_group()


@fault("READONLY in place")
def demoted(scene: Scene) -> None:
    """It becomes a replica of nobody, and its links stay; then it is promoted."""
    with scene.server(), scene.outage(*scene.stage.workers):
        scene.stage.ask(lambda client: client.execute_command("REPLICAOF", "127.0.0.1", "1"))
        scene.last(0.3, 2.0)
        scene.stage.ask(lambda client: client.execute_command("REPLICAOF", "NO", "ONE"))


@fault("leader's lock deleted")
def lose_lock(scene: Scene) -> None:
    """Two promoters, and two schedulers, each think that they lead."""
    keys = scene.stage.keys
    with scene.server():
        for _ in range(5):
            scene.stage.ask(lambda client: client.delete(keys.promoter_lock, keys.scheduler_lock))
            scene.last(0.1, 0.5)
