"""A recording as text: a table of scripts, then a scene at a time, a line for each command."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Self

from tests.frames.normal import Command, Numbers, first_key, kind_of, unnumbered

#: What is sent only if enough time passes: looks and renewals.
TIMED = frozenset(
    ("GETEX", "PTTL", "TIME", "XPENDING", "ZCARD", "ZCOUNT", "reclaim", "renew", "sweep", "trim")
)


@dataclass
class Recording:
    """What was sent, on which servers."""

    #: The SHA1 of each script, by its name.
    scripts: dict[str, str] = field(default_factory=dict)
    #: Lines by scene and server.
    scenes: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    @property
    def servers(self) -> list[str]:
        return list(dict.fromkeys(server for _, server in self.scenes))

    def of(self, servers: Iterable[str]) -> Self:
        """The part about these servers."""
        kept = {key: lines for key, lines in self.scenes.items() if key[1] in servers}
        return type(self)(self.scripts, kept)

    def add(self, other: Self) -> None:
        """Take over what another recording has."""
        self.scripts |= other.scripts
        self.scenes |= other.scenes

    def dump(self) -> str:
        """All as text. Scenes that are alike have one text below several titles."""
        texts: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for (scene, server), sent in self.scenes.items():
            texts.setdefault(tuple(sent), {}).setdefault(scene, []).append(server)
        lines = [f"{name} {sha}" for name, sha in sorted(self.scripts.items())]
        for sent, titles in texts.items():
            lines.append("")
            lines += (f"== {scene} == {' '.join(servers)}" for scene, servers in titles.items())
            lines += sent
        return "\n".join(lines) + "\n"

    @classmethod
    def load(cls, path: Path) -> Self:
        head, *parts = path.read_text().rstrip("\n").split("\n\n")
        recording = cls(dict(line.split() for line in head.splitlines()))
        for part in parts:
            lines = part.split("\n")
            titles = [line for line in lines if line.startswith("== ")]
            for title in titles:
                _, scene, servers = re.split("== | == ", title)
                for server in servers.split():
                    recording.scenes[scene, server] = lines[len(titles) :]
        return recording


def scene_lines(connections: list[list[Command]], *, is_loose: bool) -> list[str]:
    """The lines of one scene, connections in an order that does not depend on time."""
    if is_loose:
        connections = [_sorted_by_kind(commands) for commands in connections]
    connections.sort(
        key=lambda commands: unnumbered(one for one in commands if kind_of(one) not in TIMED)
    )
    numbers = Numbers()
    lines = []
    for commands in connections:
        lines.append("-- connection, loose" if is_loose else "-- connection")
        for command in commands:
            is_timed = is_loose and kind_of(command) in TIMED
            lines.append(("? " if is_timed else "") + numbers.line(command))
    return lines


def _sorted_by_kind(commands: list[Command]) -> list[Command]:
    """Each command once, by kind; what is sent only now and then comes last."""
    distinct = dict.fromkeys(commands)
    return sorted(distinct, key=lambda one: (kind_of(one) in TIMED, kind_of(one), first_key(one)))


# ── Comparing ───────────────────────────────────────────────────────────────────────────────────


def differences(old: Recording, new: Recording) -> Iterator[str]:
    """What differs between two recordings, a readable text for each script and scene."""
    for name in sorted(old.scripts.keys() & new.scripts.keys()):
        if old.scripts[name] != new.scripts[name]:
            yield f"script {name}: {old.scripts[name]} became {new.scripts[name]}"
    names = _old_names(old, new)
    for scene, server in dict.fromkeys((*old.scenes, *new.scenes)):
        there = [recording.scenes.get((scene, server)) for recording in (old, new)]
        title = f"scene {scene!r} on {server}"
        if there[0] is None or there[1] is None:
            yield f"{title}: only in the {'new' if there[0] is None else 'old'} recording"
            continue
        theirs = [_with_names(line, names) for line in there[1]] if names else there[1]
        if (found := _first_difference(there[0], theirs)) is not None:
            yield f"{title}: {found}"


def _old_names(old: Recording, new: Recording) -> dict[str, str]:
    """What scripts were called that have the same text and a new name."""
    names = {sha: name for name, sha in old.scripts.items()}
    return {name: names[sha] for name, sha in new.scripts.items() if names.get(sha, name) != name}


def _with_names(line: str, names: dict[str, str]) -> str:
    return re.sub(
        r"<(script|source)-([\w-]+)>", lambda m: f"<{m[1]}-{names.get(m[2], m[2])}>", line
    )


def _first_difference(old: list[str], new: list[str]) -> str | None:
    if old == new:
        return None
    pairs = zip_longest(_connections(old), _connections(new))
    for number, (ours, theirs) in enumerate(pairs, 1):
        if ours is None or theirs is None:
            which, lines = ("new", theirs) if ours is None else ("old", ours)
            first = (lines or ["nothing"])[0]
            return (
                f"connection {number} is only in the {which} recording; it begins with\n  {first}"
            )
        timed = _timed(ours), _timed(theirs)
        for kind in timed[0].keys() & timed[1].keys():
            if not set(timed[0][kind]) & set(timed[1][kind]):
                return f"connection {number}\n{_shown(timed[0][kind][0], timed[1][kind][0])}"
        steady = [[line for line in lines if line[:2] != "? "] for lines in (ours, theirs)]
        for at, (one, other) in enumerate(zip_longest(*steady), 1):
            if one != other:
                return f"connection {number}, command {at}\n{_shown(one, other)}"
    return None


def _connections(lines: list[str]) -> list[list[str]]:
    parts: list[list[str]] = []
    for line in lines:
        if line.startswith("-- "):
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def _timed(lines: list[str]) -> dict[tuple[str, int], list[str]]:
    """The lines that begin with `?`, by what is called and how many arguments it has."""
    timed: dict[tuple[str, int], list[str]] = {}
    for line in lines:
        if line.startswith("? "):
            words = line.split(" ")
            kind = words[2] if words[1].startswith("EVAL") else words[1]
            timed.setdefault((kind, len(words)), []).append(line)
    return timed


def _shown(old: str | None, new: str | None) -> str:
    """Both commands, from a little before the first argument that differs."""
    if old is None or new is None:
        return f"  old  {old or 'nothing'}\n  new  {new or 'nothing'}"
    ours, theirs = old.split(" "), new.split(" ")
    pairs = enumerate(zip_longest(ours, theirs))
    at = next((i for i, (one, other) in pairs if one != other), 0)
    start = max(0, at - 3)
    head = " ".join(ours[: min(start, 2)])
    note = f"{head} … " if start else ""

    def part(words: list[str]) -> str:
        rest = " …" if len(words) > at + 4 else ""
        return note + " ".join(words[start : at + 4]) + rest

    lengths = "" if len(ours) == len(theirs) else f"; {len(ours)} arguments became {len(theirs)}"
    return f"  argument {at}{lengths}\n  old  {part(ours)}\n  new  {part(theirs)}"
