"""Turns commands into text that is the same in every run: see the package's docstring."""

import functools
import hashlib
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from tests.frames.scripts import Scripts


class Fixed(NamedTuple):
    """What stands for any value."""

    text: str


class Numbered(NamedTuple):
    """What stands for one value, and has its number."""

    kind: str
    value: bytes


Argument: TypeAlias = tuple[bytes | Fixed | Numbered, ...]
Command: TypeAlias = tuple[Argument, ...]

#: Ids and times, wherever they stand in an argument. Times of msgpack are eight bytes behind 0xcf.
_VALUES = re.compile(
    rb"(?P<uuid>\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)"
    rb"|(?P<consumer>" + re.escape(socket.gethostname().encode()) + rb"-\d+-[0-9a-f]{8}\b)"
    rb"|(?P<ulid>(?<![0-9A-Za-z])[0-7][0-9A-HJKMNP-TV-Z]{25}(?![0-9A-Za-z]))"
    rb"|(?P<entry>(?<!\d)1[5-9]\d{11}-\d+(?!\d))"
    rb"|(?P<text>(?<!\d)1[5-9]\d{11}(?!\d))"
    rb"|(?<=\xcf)(?P<packed>\x00\x00\x01[\x80-\xff][\x00-\xff]{4})"
    rb"|(?<=\xabduration_us)(?P<us>[\xa1-\xa9]\d+)"
)
#: What stands for the argument behind one of these, in commands that have words for their options.
_BEHIND = {b"BLOCK": "wait", b"LIB-VER": "version", b"duration_us": "us"}
#: The server's clock cannot be further ahead of the client's, which stands still.
_SERVER_MS = range(1_000, 600_000)
#: Where jobs begin in the arguments of `complete`, and where a job says how long it ran.
_COMPLETE_JOB, _COMPLETE_US = 5, 6


class Normal:
    """Makes commands of frames. `t0_ms` is the time at which the client's clock stands."""

    def __init__(self, scripts: Scripts, t0_ms: int) -> None:
        self._scripts = scripts
        self._t0_ms = t0_ms

    def command(self, frame: bytes) -> Command:
        """A frame's arguments, with what differs between runs replaced."""
        words = _words(frame)
        if words is None:
            return ((Fixed("no array of strings:"), frame),)
        verb = words[0].upper()
        if verb in (b"EVALSHA", b"EVAL", b"SCRIPT"):
            return self._script_command(verb, words)
        command = [self._argument(word) for word in words]
        for i, word in enumerate(words[:-1]):
            if word in _BEHIND:
                command[i + 1] = (Fixed(_BEHIND[word]),)
        if verb == b"UNLINK":  # as a SCAN found them: in any order
            command[1:] = sorted(command[1:], key=lambda one: (unnumbered([(one,)]), str(one)))
        if verb in (b"BLPOP", b"WAITAOF", b"WAIT"):
            command[-1] = (Fixed("wait"),)
        return tuple(command)

    def _script_command(self, verb: bytes, words: list[bytes]) -> Command:
        at = 2 if verb == b"SCRIPT" else 1
        sha = words[1].decode()
        if verb != b"EVALSHA":
            sha = hashlib.sha1(words[at], usedforsecurity=False).hexdigest()
        name = self._scripts.name(sha)
        command = [self._argument(word) for word in words]
        command[at] = (Fixed(f"{'script' if verb == b'EVALSHA' else 'source'} {name}"),)
        if verb == b"SCRIPT":
            return tuple(command)
        first = 3 + int(words[2])  # behind the keys
        if name == "complete":
            has_events, has_history = (bool(word) for word in words[first + 3 : first + 5])
            size = 2 + (6 if has_events or has_history else 0) + has_history
            if size > 2:
                for job in range(first + _COMPLETE_JOB, len(words), size):
                    command[job + _COMPLETE_US] = (Fixed("us"),)
        for i in range(first, len(words) - 1):
            if words[i] == b"traceback":
                last = words[i + 1].strip().rpartition(b"\n")[2]
                command[i + 1] = (Fixed("traceback"), last)
        return tuple(command)

    def _argument(self, word: bytes) -> Argument:
        parts: list[bytes | Fixed | Numbered] = []
        end = 0
        for found in _VALUES.finditer(word):
            parts.append(word[end : found.start()])
            end = found.end()
            kind, value = found.lastgroup or "", found[0]
            if kind == "text":
                parts.append(self._time(int(value)))
            elif kind == "packed":
                parts.append(self._time(int.from_bytes(value)))
            else:
                parts.append(Fixed(kind) if kind == "us" else Numbered(kind, value))
        parts.append(word[end:])
        return tuple(part for part in parts if part)

    def _time(self, ms: int) -> Fixed:
        ahead_ms = ms - self._t0_ms
        if ahead_ms == 0:
            return Fixed("t0")
        if ahead_ms in _SERVER_MS:
            return Fixed("now")
        return Fixed(f"t0{ahead_ms // 1000:+d}s" if ahead_ms % 1000 == 0 else "ms")


class Numbers:
    """Gives each value its number, in the order in which they are shown."""

    def __init__(self) -> None:
        self._given: dict[str, dict[bytes, int]] = {}

    def line(self, command: Command) -> str:
        """A command as a line of a recording: its arguments, with a blank between them."""
        return " ".join(self._shown(argument) for argument in command)

    def _shown(self, argument: Argument) -> str:
        return "".join(map(self._part, argument)) or '""'

    def _part(self, part: bytes | Fixed | Numbered) -> str:
        if isinstance(part, bytes):
            return escaped(part)
        if isinstance(part, Fixed):
            return f"<{part.text.replace(' ', '-')}>"
        given = self._given.setdefault(part.kind, {})
        return f"<{part.kind}:{given.setdefault(part.value, len(given) + 1)}>"


def kind_of(command: Command) -> str:
    """By what commands of loose scenes are sorted: the script, or the command and a word more."""
    words = [part[0] if part else b"" for part in command[:6]]
    first = words[0]
    if isinstance(words[1] if len(words) > 1 else b"", Fixed):
        return words[1].text.partition(" ")[2]
    verb = first.decode(errors="replace") if isinstance(first, bytes) else first.text
    if verb == "CLIENT" and isinstance(words[1], bytes):
        return f"CLIENT {words[1].decode()}"
    if verb == "XADD" and isinstance(words[4], bytes):  # XADD key * e <event>
        return f"XADD {words[4].decode()}"
    return verb


def first_key(command: Command) -> str:
    """The first key of a script: promoter and scheduler use the same one with keys of their own."""
    is_script = len(command) > 3 and isinstance(command[1][0] if command[1] else b"", Fixed)
    return unnumbered([command[3:4]])[0] if is_script else ""


def unnumbered(commands: Iterable[Command]) -> list[str]:
    """Lines in which all values of a kind look alike: to bring connections into an order."""
    return [re.sub(r"<(\w+):\d+>", r"<\1>", Numbers().line(command)) for command in commands]


def escaped(data: bytes) -> str:
    """Bytes as one word of printable text, which has no blank and none of `<>`."""
    return "".join(map(_escaped_byte, data))


@functools.cache
def _escaped_byte(byte: int) -> str:
    return chr(byte) if 33 <= byte <= 126 and chr(byte) not in '\\<>"' else f"\\x{byte:02x}"


def _words(frame: bytes) -> list[bytes] | None:
    """The arguments of a frame; None if it is not exactly what these arguments make."""
    words = []
    at = frame.find(b"\r\n") + 2
    while at < len(frame):
        end = frame.find(b"\r\n", at)
        if frame[at : at + 1] != b"$" or end < 0:
            return None
        size = int(frame[at + 1 : end])
        words.append(frame[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    again = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)
    return words if words and again == frame else None
