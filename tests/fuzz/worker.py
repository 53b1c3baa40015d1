"""The process that holds the sanitized core: feeds it one input after the other.

Started by tests.fuzz.run only, with SLOT SEED INPUTS TARGET... or with --replay FILE TARGET.
"""

import random
import resource
import sys
import time
from pathlib import Path

from chasqui._core import reply
from tests.fuzz.corpus import Corpus
from tests.fuzz.mutate import mutate
from tests.fuzz.sanitized import LIB
from tests.fuzz.slot import Slot, State
from tests.fuzz.targets import TARGETS, Target, WrongAnswerError

#: How far the process may grow: more than any input needs, less than any leak gives in the end.
MAX_GROWTH_KB = 64 * 1024

_POOL = 2048
_BATCH = 500


def main() -> None:
    core = Path(reply.__file__)
    if not core.is_relative_to(LIB) or b"__asan_report" not in core.read_bytes():
        sys.exit(f"the core is not the sanitized one: {reply.__file__}")
    if sys.argv[1] == "--replay":
        path, name = sys.argv[2:]
        is_accepted = TARGETS[name].check(Path(path).read_bytes())
        print(f"{name}: {'accepted' if is_accepted else 'refused'}, as it must be")
        return
    path, seed, inputs, *names = sys.argv[1:]
    slot = Slot(Path(path))
    base_kb = _resident_kb()
    for place, name in enumerate(names):
        rng = random.Random(f"{seed} {name}")
        _run(TARGETS[name], int(inputs), rng, slot, place, base_kb)


def _run(
    target: Target, inputs: int, rng: random.Random, slot: Slot, place: int, base_kb: int
) -> None:
    corpus = Corpus(rng)
    pool = [target.make(corpus) for _ in range(_POOL)]
    format, check = target.format, target.check
    start = time.monotonic()
    accepted = done = 0
    while done < inputs:
        for _ in range(min(_BATCH, inputs - done)):
            data = mutate(format, pool, rng)
            slot.set_input(place, data)
            accepted += check(data)
            done += 1
        for _ in range(8):
            pool[rng.randrange(_POOL)] = target.make(corpus)
        growth_kb = max(0, _resident_kb() - base_kb)
        elapsed_ms = int(1000 * (time.monotonic() - start))
        slot.set_state(place, State(done, accepted, elapsed_ms, growth_kb))
        if growth_kb > MAX_GROWTH_KB:
            raise WrongAnswerError(f"the process grew by {growth_kb} kB in {done} inputs")


def _resident_kb() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024
    except OSError:  # not Linux: the most it ever was, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
