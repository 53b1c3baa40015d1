"""What may go wrong, and what is right then. Each has tests, and a control that must be caught.

A test says which faults it shows with `@pytest.mark.fault(number)`, wherever it lives. A control,
`@pytest.mark.fault(number, control=True)`, takes the protection away and asserts that the same
check then fails. `python -m tests.faults` lists them all.
"""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One fault: its number, its name and the behaviour that is right under it."""

    number: int
    title: str
    right: str


#: Number: name, what is right.
_ENTRIES = {
    # ── Processes ───────────────────────────────────────────────────────────────────────────────
    1: ("worker killed in a handler", "another worker runs the job after the lease"),
    2: ("worker killed between handler and ack", "one more run for each ack that was not sent"),
    3: ("SIGTERM under load", "reads no more, finishes, sends its acks, hands back the rest"),
    4: ("second signal", "ends at once; what did not finish is not acknowledged"),
    5: ("worker stopped past its lease", "its late acks and moves are refused and reported"),
    # ── Servers ─────────────────────────────────────────────────────────────────────────────────
    6: ("server killed, AOF always", "nothing is lost, work goes on"),
    7: ("server killed, AOF everysec", "no add that WAITAOF confirmed is lost; others are counted"),
    8: ("power cut, AOF tail gone", "lost acks are runs again; lost adds only if unconfirmed"),
    9: ("server back empty", "the group is made again at 0 and work goes on"),
    10: ("Sentinel failover", "the new primary is found; nothing is lost that a replica had"),
    11: ("primary demoted in place", "READONLY is a broken link: found anew and sent again"),
    12: ("cluster slot moves", "MOVED, ASK and TRYAGAIN are followed, by blocked readers too"),
    13: ("cluster node lost", "waited for; queues of other nodes do not notice"),
    # ── Links ───────────────────────────────────────────────────────────────────────────────────
    14: ("links reset", "new links; adds of unknown fate are sent again and happen once"),
    15: ("link half open", "the deadline of each read finds it, and a new link takes over"),
    16: ("reply lost", "what was done is not done twice"),
    17: ("request cut at any byte", "done or not done, never by halves"),
    18: ("slow and trickling link", "deadlines hold, no busy loop, memory is bounded"),
    19: ("server that stands still", "waited for without a storm of dials; leases are minded"),
    20: ("server busy with a script", "BUSY is waited out; delayed jobs still come"),
    # ── What the server has and refuses ─────────────────────────────────────────────────────────
    21: ("out of memory, noeviction", "adds fail with an error of ours; the queue drains"),
    22: ("out of memory, eviction", "warned of at the start; an evicted queue is begun anew"),
    23: ("scripts flushed", "sent whole again; no caller sees it"),
    24: ("stream deleted under a reader", "found within one blocking read; work goes on"),
    25: ("group destroyed", "made again at 0, said once, what is in the stream runs"),
    26: ("consumer deleted", "never by us while it has entries; a census shows what it had"),
    27: ("trimmed while pending", "reported as lost by trimming; nothing sticks"),
    28: ("key of a wrong type", "an error of ours; nothing leaves before its copy is made"),
    29: ("rights taken away", "the same, and work goes on when they are given back"),
    # ── Clocks and duties ───────────────────────────────────────────────────────────────────────
    30: ("server's clock jumps an hour", "ids rise; only what is in flight may be taken over"),
    31: ("worker's clock jumps", "leases and backoffs do not see it; one fire per slot"),
    32: ("promoter stopped past its lease", "no job is promoted twice, none is missed"),
    33: ("two schedulers think they lead", "a slot that has been fired is not fired again"),
    34: ("leader killed", "its lease ends by itself and another takes over"),
    # ── Servers that refuse everything for a while ──────────────────────────────────────────────
    35: ("disk full", "adds fail with an error of ours; work goes on when there is room"),
    36: ("server still loading", "waited for; nothing is concluded about what it can do"),
    37: ("refused at the door", "not dialled in a storm; credentials are asked for again"),
    38: ("bad certificates", "refused with a clear error; a renewed one is accepted"),
    39: ("another server on the same port", "what it can do is asked on each link"),
    # ── Bytes ───────────────────────────────────────────────────────────────────────────────────
    40: ("huge payload", "refused before it is sent; from others, buried without being read"),
    41: ("broken envelope", "buried with the reason; the worker lives"),
    42: ("nesting and length bombs", "refused by depth and by the bytes that are there"),
    43: ("text that is no UTF-8", "buried or replaced; other jobs run"),
    44: ("replies that are no RESP", "the link is dropped and another one works"),
    45: ("replies in pieces", "the same objects wherever they are cut"),
    46: ("replies that announce too much", "refused before memory is taken"),
    47: ("odd queue names", "one rule refuses them; no two queues share a key"),
    # ── Handlers ────────────────────────────────────────────────────────────────────────────────
    48: ("handler raises anything", "a failed run; the worker lives or stops in order"),
    49: ("handler never returns", "it fails at its time limit and its slot is free"),
    50: ("handler blocks the loop", "its lease is kept; nobody else runs it"),
    51: ("handler forks", "the child does not touch its parent's links"),
    52: ("call cancelled", "the next call gets its own reply"),
    # ── The process ─────────────────────────────────────────────────────────────────────────────
    53: ("no descriptors, no memory", "an error, Python's own for memory, and the next call works"),
    54: ("interpreter ends in the middle", "no hang and no crash on the way out"),
    55: ("days of work", "memory, descriptors and the server's memory stay flat"),
}

CATALOGUE = {
    number: CatalogueEntry(number, title, right) for number, (title, right) in _ENTRIES.items()
}


@dataclass(frozen=True, slots=True)
class Mark:
    """What a test says with `@pytest.mark.fault`."""

    number: int
    control: bool = False


def marks_of(item: pytest.Item) -> list[Mark]:
    """The faults that a test shows."""
    marks = [Mark(*mark.args, **mark.kwargs) for mark in item.iter_markers("fault")]
    for mark in marks:
        if mark.number not in CATALOGUE:
            raise pytest.UsageError(f"{item.nodeid}: there is no fault {mark.number}")
    return marks
