"""What a worker process is to see, and what it tells of it.

Standard library only: it runs in every peer's environment.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from bench.peers.meter import Meter, ServerInfo, cpu_s, rss_mb

Data = dict[str, Any]
#: What a task does with a job. It raises where the job is to fail.
Handle = Callable[[Data], None]

#: The part of a latency run that counts as warming up.
WARMUP = 0.05
FAILURE = "fails the first time"


class Task:
    """What one worker process is to see, and what it tells when it has."""

    def __init__(self, url: str, n: int) -> None:
        self.url = url
        self.n = n
        self.done = threading.Event()
        self.on_done: Callable[[], None] = self.done.set

    def handle(self, data: Data) -> None:
        raise NotImplementedError

    def result(self) -> Data:
        raise NotImplementedError


class Drain(Task):
    """Runs n jobs that wait in the queue, each once; first call to last."""

    def __init__(
        self, url: str, n: int, retries: bool = False, locked: bool = False, memory: bool = False
    ) -> None:
        super().__init__(url, n)
        self._runs = bytearray(n)
        self._first_s = self._last_s = 0.0
        self._rss_mb: list[float] = []
        self._started_s = time.monotonic()
        self._meter = Meter(url)
        handle = self._counter()
        if memory:
            handle = self._watching(handle)
        if retries:
            handle = self._failing(handle)
        if locked:
            handle = self._locked(handle)
        self.handle = handle  # type: ignore[method-assign]

    def _counter(self) -> Handle:
        runs, n, count = self._runs, self.n, 0

        def hit(data: Data) -> None:
            nonlocal count
            runs[data["n"]] += 1
            count += 1
            if count == 1:
                self._first_s = time.monotonic()
            if count == n:
                self._last_s = time.monotonic()
                self.on_done()

        return hit

    def _failing(self, handle: Handle) -> Handle:
        failed = bytearray(self.n)

        def hit(data: Data) -> None:
            if not failed[data["n"]]:
                failed[data["n"]] = 1
                self._first_s = self._first_s or time.monotonic()
                raise RuntimeError(FAILURE)
            first_s = self._first_s
            handle(data)
            self._first_s = first_s

        return hit

    def _watching(self, handle: Handle) -> Handle:
        every, count = max(1, self.n // 20), 0

        def hit(data: Data) -> None:
            nonlocal count
            count += 1
            if count % every == 0:
                self._rss_mb.append(rss_mb())
            handle(data)

        return hit

    @staticmethod
    def _locked(handle: Handle) -> Handle:
        lock = threading.Lock()

        def hit(data: Data) -> None:
            with lock:
                handle(data)

        return hit

    def result(self) -> Data:
        ran = sum(map(bool, self._runs))
        told: Data = {"ran": ran, "more_than_once": sum(runs > 1 for runs in self._runs)}
        if self._rss_mb:
            told["rss_mb_over_time"] = self._rss_mb
        if ran < self.n:
            return {**told, "error": f"ran {ran} of {self.n} jobs"}
        seconds = self._last_s - self._first_s
        told["startup_s"] = self._first_s - self._started_s
        return {**self._meter.spent(self.n, seconds), **told}


class Delays(Task):
    """Runs jobs that carry a moment, and notes how long after it they came."""

    def __init__(self, url: str, n: int, field: str) -> None:
        super().__init__(url, n)
        self._samples: list[float] = []
        clock = time.monotonic if field == "t" else time.time
        samples, append = self._samples, self._samples.append

        def hit(data: Data) -> None:
            append(clock() - data[field])
            if len(samples) == n:
                self.on_done()

        self.handle = hit  # type: ignore[method-assign]

    def result(self) -> Data:
        if len(self._samples) < self.n:
            return {"error": f"ran {len(self._samples)} of {self.n} jobs"}
        kept = sorted(self._samples[int(self.n * WARMUP) :])
        at = [kept[min(len(kept) - 1, int(len(kept) * i / 1000))] * 1e3 for i in range(1001)]
        return {
            "n": self.n,
            "p50_ms": at[500],
            "p90_ms": at[900],
            "p99_ms": at[990],
            "max_ms": at[1000],
            "early": sum(sample < -0.001 for sample in kept),
            "quantiles_ms": at[::10],
        }


class Due(Task):
    """Runs n jobs that fall due at one moment; from that moment to the last one."""

    def __init__(self, url: str, n: int, due_s: float) -> None:
        super().__init__(url, n)
        self._due_s = due_s
        self._count = self._early = 0
        self._first_s = self._last_s = 0.0
        self._meter = Meter(url)

    def handle(self, data: Data) -> None:
        now_s = time.time()
        self._count += 1
        self._early += now_s < self._due_s - 0.001
        if self._count == 1:
            self._first_s = now_s
        if self._count == self.n:
            self._last_s = now_s
            self.on_done()

    def result(self) -> Data:
        if self._count < self.n:
            return {"error": f"ran {self._count} of {self.n} jobs"}
        cost = self._meter.spent(self.n, self._last_s - self._due_s)
        return {**cost, "early": self._early, "first_after_ms": (self._first_s - self._due_s) * 1e3}


class Idle(Task):
    """Has nothing to do for a while."""

    def __init__(self, url: str, seconds: float) -> None:
        super().__init__(url, 0)
        self._told: Data = {}
        threading.Thread(target=self._watch, args=(seconds,), daemon=True).start()

    def _watch(self, seconds: float) -> None:
        time.sleep(2)  # its start is not idling
        server = ServerInfo(self.url)
        calls, cpu, server_cpu = server.calls(), cpu_s(), server.cpu_s()
        start_s = time.monotonic()
        time.sleep(seconds)
        passed_s = time.monotonic() - start_s
        more = {name: count - calls.get(name, 0) for name, count in server.calls().items()}
        self._told = {
            "cpu_percent": (cpu_s() - cpu) / passed_s * 100,
            "server_cpu_percent": (server.cpu_s() - server_cpu) / passed_s * 100,
            "commands_per_s": sum(more.values()) / passed_s,
            "commands": {name: count for name, count in more.items() if count},
            "rss_mb": rss_mb(),
        }
        self.on_done()

    def handle(self, data: Data) -> None:
        raise RuntimeError("the queue was to be empty")

    def result(self) -> Data:
        return self._told


class Count(Task):
    """Runs jobs that may be all the same; how many there were."""

    def __init__(self, url: str, n: int) -> None:
        super().__init__(url, n)
        self._count = 0

    def handle(self, data: Data) -> None:
        self._count += 1
        if self._count >= self.n:
            self.on_done()

    def result(self) -> Data:
        return {"n": self.n, "count": self._count}


WORKING: dict[str, Callable[..., Task]] = {
    "drain": Drain,
    "delays": Delays,
    "due": Due,
    "idle": Idle,
    "count": Count,
}
