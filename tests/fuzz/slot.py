"""What a worker is doing, in a mapped file that outlives the worker however it dies."""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

#: No input is longer.
MAX_INPUT_BYTES = 1 << 18

#: The most targets that one worker may go through.
_MAX_TARGETS = 16

_STATE = struct.Struct("<4Q")
_INPUT = struct.Struct("<2I")
_INPUT_AT = _MAX_TARGETS * _STATE.size
_DATA_AT = _INPUT_AT + _INPUT.size


class State(NamedTuple):
    """How far a worker is with one target."""

    inputs: int = 0
    accepted: int = 0
    elapsed_ms: int = 0
    growth_kb: int = 0  # of the process since it began


class Slot:
    """One per worker: it writes, the parent reads. Targets go by their place in its list."""

    def __init__(self, path: Path) -> None:
        size = _DATA_AT + MAX_INPUT_BYTES
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def set_state(self, place: int, state: State) -> None:
        _STATE.pack_into(self._map, place * _STATE.size, *state)

    def state(self, place: int) -> State:
        return State(*_STATE.unpack_from(self._map, place * _STATE.size))

    def set_input(self, place: int, data: bytes) -> None:
        """Note an input before it is fed."""
        _INPUT.pack_into(self._map, _INPUT_AT, place, len(data))
        self._map[_DATA_AT : _DATA_AT + len(data)] = data

    def input(self) -> tuple[int, bytes]:
        """The target and the input that were noted last."""
        place, size = _INPUT.unpack_from(self._map, _INPUT_AT)
        return place, self._map[_DATA_AT : _DATA_AT + size]
