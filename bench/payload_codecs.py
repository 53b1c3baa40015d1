"""What encodes payloads: measure the candidates against msgpack, print a markdown table.

    python bench/payload_codecs.py                           print it
    python bench/payload_codecs.py --write docs/payloads.md  put it between the markers there

Needs `ormsgpack` and `msgspec` (the `dev` extra).
"""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import platform
import sys
import timeit
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import ormsgpack

from chasqui._core.payload import pack, unpack

MARKERS = ("<!-- begin bench/payload_codecs.py -->", "<!-- end bench/payload_codecs.py -->")

#: A candidate has to be this much faster in both directions, on every payload, to be worth an
#: extra dependency and a second code path.
NEEDED = 1.3

PAYLOADS: dict[str, Any] = {
    "small": {"to": "user@example.com", "n": 123},
    "an int": 123,
    "100 ints": list(range(100)),
    "an order": {
        "user": {"id": 12345, "name": "Ada", "tags": ["new", "eu"], "active": True},
        "items": [{"sku": f"sku-{i}", "quantity": i, "price": 9.99} for i in range(10)],
    },
    "4 kB of text": {"body": "x" * 4096},
    "4 kB of bytes": {"body": b"x" * 4096},
}


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int = 1


#: What must be refused: none of it comes back as it went in.
REFUSED: dict[str, object] = {
    "tuple": (1, 2),
    "set": {1, 2},
    "datetime": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "UUID": uuid.UUID(int=1),
    "Decimal": decimal.Decimal("1.5"),
    "Enum": Color.RED,
    "dataclass": Point(),
    "dict subclass": collections.OrderedDict(a=1),
}


@dataclasses.dataclass(frozen=True)
class Codec:
    """A library at its best: objects reused, as strict as its options allow.

    The calls are source text on `value`, so that timing one adds no call around it.
    """

    name: str
    encode: str
    decode: str
    names: dict[str, object]

    def run(self, call: str, value: object) -> Any:
        return eval(call, {**self.names, "value": value})


def codecs() -> list[Codec]:
    """The library first, then the candidates."""
    strict = (
        ormsgpack.OPT_PASSTHROUGH_DATACLASS
        | ormsgpack.OPT_PASSTHROUGH_DATETIME
        | ormsgpack.OPT_PASSTHROUGH_ENUM
        | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
        | ormsgpack.OPT_PASSTHROUGH_TUPLE
        | ormsgpack.OPT_PASSTHROUGH_UUID
    )
    return [
        Codec(
            "msgpack",
            "pack(value)",
            "unpackb(value, raw=False, strict_map_key=True)",
            {
                "pack": msgpack.Packer(use_bin_type=True, strict_types=True).pack,
                "unpackb": msgpack.unpackb,
            },
        ),
        Codec(
            "chasqui",
            "pack(value, 1048576)",
            "unpack(value)",
            {"pack": pack, "unpack": unpack},
        ),
        Codec(
            "ormsgpack",
            "packb(value, None, strict)",
            "unpackb(value)",
            {"packb": ormsgpack.packb, "unpackb": ormsgpack.unpackb, "strict": strict},
        ),
        Codec(
            "msgspec",
            "encode(value)",
            "decode(value)",
            {
                "encode": msgspec.msgpack.Encoder().encode,
                "decode": msgspec.msgpack.Decoder().decode,
            },
        ),
    ]


def accepted(codec: Codec) -> list[str]:
    """What the codec encodes although it should not."""
    names = []
    for name, value in REFUSED.items():
        try:
            if codec.run(codec.encode, value) is not None:
                names.append(name)
        except (TypeError, ValueError):
            continue
    return names


def nanoseconds(timers: list[timeit.Timer]) -> list[float]:
    """The best time of each. Rounds take turns, so that a slow moment hits all alike."""
    best = [float("inf")] * len(timers)
    for _ in range(60):
        for index, timer in enumerate(timers):
            best[index] = min(best[index], timer.timeit(number=1000) * 1e6)
    return best


def report() -> str:
    """The table and the decision, as markdown."""
    plain, *candidates = all_codecs = codecs()
    lines = [
        f"Nanoseconds a call, the best of 60 rounds; the factor is against {plain.name}. "
        f"Python {platform.python_version()} on {platform.machine()}; "
        + ", ".join(f"{codec.name} {version(codec.name)}" for codec in all_codecs)
        + ".",
        "",
        "| payload | direction | " + " | ".join(codec.name for codec in all_codecs) + " |",
        "| --- | --- |" + " ---: |" * len(all_codecs),
    ]
    slowest = {(c.name, d): float("inf") for c in candidates for d in ("encode", "decode")}
    for title, value in PAYLOADS.items():
        data = plain.run(plain.encode, value)
        for codec in all_codecs:
            assert codec.run(codec.encode, value) == data, (codec.name, title)
            assert codec.run(codec.decode, data) == value, (codec.name, title)
        for direction, argument in (("encode", value), ("decode", data)):
            timers = [
                timeit.Timer(getattr(codec, direction), globals={**codec.names, "value": argument})
                for codec in all_codecs
            ]
            base, *others = nanoseconds(timers)
            cells = [f"{base:.0f}"]
            for codec, time in zip(candidates, others, strict=True):
                factor = base / time
                key = (codec.name, direction)
                slowest[key] = min(slowest[key], factor)
                cells.append(f"{time:.0f} ({factor:.1f}x)")
            lines.append(f"| {title} | {direction} | " + " | ".join(cells) + " |")
    lines.append("")
    for codec in candidates:
        encode, decode = slowest[codec.name, "encode"], slowest[codec.name, "decode"]
        extra = accepted(codec)
        taken = min(encode, decode) > NEEDED and not extra
        lines.append(
            f"- **{codec.name}: {'taken' if taken else 'not taken'}.** At its worst it encodes "
            f"at {encode:.1f}x and decodes at {decode:.1f}x; {NEEDED}x is asked of both. "
            + (f"It cannot be told to refuse: {', '.join(extra)}." if extra else "It is as strict.")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put the table between its markers"
    )
    target = parser.parse_args().write
    text = report()
    if target is None:
        print(text)
        return
    begin, end = MARKERS
    head, found, rest = target.read_text().partition(begin)
    tail = rest.partition(end)[2]
    if not found or not tail:
        sys.exit(f"{target} has no lines {begin} and {end}")
    target.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


if __name__ == "__main__":
    main()
