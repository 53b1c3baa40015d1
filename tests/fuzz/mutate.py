"""One input out of valid ones: nothing here knows the targets, only their formats.

`mutate` draws one number and takes it apart, because drawing costs more than what is done with it.
"""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from tests.fuzz.slot import MAX_INPUT_BYTES


class Format(NamedTuple):
    """What to look for and what to put there."""

    kind: re.Pattern[bytes]  # a byte that says which type follows
    kinds: tuple[bytes, ...]
    length: re.Pattern[bytes]  # a length, as group 1
    lengths: tuple[bytes, ...]
    wrappers: tuple[bytes, ...]  # what makes the value behind it one level deeper


_HUGE = (1 << 24, (1 << 29) + 1, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64)

RESP = Format(
    kind=re.compile(rb"(?:^|(?<=\n))[-+:,_$*%|~#=>(]"),
    kinds=tuple(bytes([kind]) for kind in b"-+:,_$*%|~#=>(!.a\0\r"),
    length=re.compile(rb"[$*%~>|=](-?[0-9]+)(?=\r\n)"),
    lengths=(
        *(str(number).encode() for number in (*range(-2, 18), *_HUGE)),
        *(b"", b"-", b"+1", b"01", b"-0", b" 1", b"1 ", b"1\r", b"0x1", b"9" * 19, b"9" * 30),
    ),
    wrappers=(b"*1\r\n", b"~1\r\n", b"%1\r\n+k\r\n", b">1\r\n", b"|1\r\n+k\r\n", b"*2\r\n$-1\r\n"),
)

MSGPACK = Format(
    kind=re.compile(rb"[\x80-\x9f\xa0-\xbf\xc0-\xdf]"),
    kinds=tuple(bytes([kind]) for kind in (0, 0x7F, 0x80, 0x90, 0x94, 0xA0, *range(0xBF, 0xE1))),
    length=re.compile(rb"(?<=[\xc4-\xc9\xcc-\xd3\xd9-\xdf])([\x00-\xff])"),
    lengths=(
        *(bytes([number]) for number in (*range(6), 31, 32, 127, 128, 254, 255)),
        *(b"", b"\xff\xff", b"\0\0\0\1", b"\x7f" + b"\xff" * 3, b"\xff" * 4, b"\xff" * 8),
    ),
    wrappers=(b"\x91", b"\x81\xa1k", b"\xdc\0\1", b"\xdd\0\0\0\1", b"\xde\0\1\1", b"\x92\xc0"),
)

WORDS = Format(
    kind=re.compile(rb"[:/@?#&=,%\[\]+.]"),
    kinds=tuple(bytes([kind]) for kind in b":/@?#&=,%[]{}+. \t\n\0\x7f\x80\xff*\\"),
    length=re.compile(rb"([0-9]+)"),
    lengths=(
        *(str(number).encode() for number in (*range(-1, 17), 65_535, 65_536, *_HUGE)),
        *(b"", b"01", b"1e3", b"0x1", b"\xd9\xa3", b"\xc2\xb2", b"9" * 30, b"9" * 5000),
    ),
    wrappers=(b"redis://", b"//", b"%25", b"a:b@", b"[", b"?db="),
)


def mutate(format: Format, pool: list[bytes], rng: random.Random) -> bytes:
    """A member of the pool: one in eight as it is, the others changed once to four times."""
    bits = rng.getrandbits(64)
    data = pool[(bits & 0xFFFF) % len(pool)]
    bits >>= 16
    changes = (0, 1, 1, 1, 1, 2, 2, 4)[bits & 7]
    bits >>= 3
    for _ in range(changes):
        change = _CHANGES[bits & 15]
        data = change(data, bits >> 4, format, pool)
        bits = rng.getrandbits(64)
    return data if len(data) <= MAX_INPUT_BYTES else data[:MAX_INPUT_BYTES]


def _place(data: bytes, bits: int) -> int:
    return (bits & 0xFFFFF) % (len(data) + 1)


def _flip(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    if not data:
        return b"\0"
    at = (bits >> 3 & 0xFFFFF) % len(data)
    return b"%b%c%b" % (data[:at], data[at] ^ 1 << (bits & 7), data[at + 1 :])


def _overwrite(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    at = _place(data, bits)
    return b"%b%c%b" % (data[:at], bits >> 20 & 0xFF, data[at + 1 :])


def _insert(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    at = _place(data, bits)
    noise = (bits >> 20 & 0xFFFFFFFF).to_bytes(4, "little")[: 1 + (bits >> 52 & 3)]
    return data[:at] + noise + data[at:]


def _cut(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    return data[: _place(data, bits)]


def _remove(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    at = _place(data, bits)
    return data[:at] + data[at + 1 + (bits >> 20 & 31) :]


def _repeat(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    at = _place(data, bits)
    run = data[at : at + 1 + (bits >> 20 & 31)]
    return data[:at] + run * (2 + (bits >> 25 & 3)) + data[at:]


def _splice(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    other = pool[(bits >> 20 & 0xFFFF) % len(pool)]
    return data[: _place(data, bits)] + other[_place(other, bits >> 36) :]


def _follow(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    return data + pool[(bits & 0xFFFF) % len(pool)]


def _change_kind(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    found = format.kind.search(data, _place(data, bits)) or format.kind.search(data)
    if not found:
        return _overwrite(data, bits, format, pool)
    kind = format.kinds[(bits >> 20 & 0xFFFF) % len(format.kinds)]
    return data[: found.start()] + kind + data[found.start() + 1 :]


def _change_length(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    found = format.length.search(data, _place(data, bits)) or format.length.search(data)
    if not found:
        return _overwrite(data, bits, format, pool)
    start, end = found.span(1)
    length = format.lengths[(bits >> 20 & 0xFFFF) % len(format.lengths)]
    return data[:start] + length + data[end:]


def _nest(data: bytes, bits: int, format: Format, pool: list[bytes]) -> bytes:
    found = format.kind.search(data, _place(data, bits))
    at = found.start() if found else 0
    wrapper = format.wrappers[(bits >> 20 & 0xFF) % len(format.wrappers)]
    # Now and then beyond every limit on depth.
    levels = 1 + (bits >> 28 & 3) if bits >> 30 & 7 else 8 << (bits >> 33 & 7)
    return data[:at] + wrapper * levels + data[at:]


_Change = Callable[[bytes, int, Format, list[bytes]], bytes]
#: Sixteen, so that four bits choose; what knows the format comes more often.
_CHANGES: tuple[_Change, ...] = (
    *(_flip, _overwrite, _insert, _cut, _remove, _repeat, _splice, _follow),
    *(_change_kind, _change_kind, _change_kind, _change_length, _change_length, _change_length),
    *(_nest, _splice),
)
