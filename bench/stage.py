"""Runs the parts of one measurement: fresh processes against one server, watched for noise."""

import json
import os
import subprocess
import time
from typing import Any

from bench.environments import ROOT, command, folder_of
from bench.libraries import NODE, Library
from bench.noise import Watch, wait_until_quiet
from bench.peers.meter import ServerInfo
from tests.servers import Server

Data = dict[str, Any]


class Running:
    """One process of a library's adapter."""

    def __init__(self, library: Library, asked: Data) -> None:
        environment = {**os.environ, "NODE_PATH": str(folder_of(NODE) / "node_modules")}
        self._limit_s = asked.get("limit_s", 120) + 60
        self._process = subprocess.Popen(
            [*command(library), json.dumps(asked)],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait_until_ready(self) -> None:
        """Return when it says so, or when it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("READY"):
                return

    def result(self) -> Data:
        """What it told at its end; an `error` if it told nothing."""
        try:
            out, err = self._process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, err = self._process.communicate()
            return {"error": f"no end after {self._limit_s:.0f} s: {_last(err)}"}
        for line in out.splitlines():
            if line.startswith("RESULT "):
                told: Data = json.loads(line.removeprefix("RESULT "))
                if self._process.returncode:  # it crashed on its way out
                    told["exit"] = self._process.returncode
                return told
        return {"error": f"exit {self._process.returncode}: {_last(err)}"}


class Stage:
    """One server, emptied before each measurement, and what happens on it."""

    def __init__(self, server: Server, quiet_limit_s: float) -> None:
        self.server = server
        self._quiet_limit_s = quiet_limit_s
        self._info = ServerInfo(server.url)
        self.version = self._version()
        self._watch: Watch | None = None
        self._waited_s = 0.0

    def start(self, library: Library, scenario: str, **asked: Any) -> Running:
        """Start one part and leave it running."""
        return Running(library, {"scenario": scenario, "url": self.server.url, **asked})

    def call(self, library: Library, scenario: str, **asked: Any) -> Data:
        """Run one part to its end."""
        return self.start(library, scenario, **asked).result()

    def clear(self) -> None:
        self._info.command("FLUSHALL SYNC")
        self._watch = None

    def measured(self) -> None:
        """What follows is what is measured: wait for a quiet machine, watch it from now on."""
        self._waited_s = wait_until_quiet(self._quiet_limit_s)
        self._watch = Watch(self.server.pid)

    def noise(self) -> Data:
        """What others did while we measured."""
        if self._watch is None:
            return {}
        noise = self._watch.noise()
        return {
            "foreign_cores": noise.foreign_cores,
            "spoiled": noise.is_spoiling,
            "waited_s": self._waited_s,
        }

    def close(self) -> None:
        """Let go of the server, which goes on running."""
        self._info.close()

    def _version(self) -> str:
        told = self._info.ask("server")
        if "valkey_version" in told:
            return f"Valkey {told['valkey_version']}"
        return f"Redis {told['redis_version']}"


def wait_until(unix_s: float) -> None:
    """Return at a unix time."""
    time.sleep(max(0.0, unix_s - time.time()))


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
