"""Valid inputs to begin with: by our own encoders, from recorded replies, and from two grammars."""

import random
import struct
from collections.abc import Callable

from chasqui._core.envelope import encode_delayed_member, encode_envelope, encode_retry
from tests.fuzz import typed

#: Replies as servers have sent them, RESP2 and RESP3.
RECORDED = (
    b"+OK\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b":0\r\n",
    b"*3\r\n:1\r\n:-1\r\n:2\r\n",
    b"$15\r\n1794797194831-0\r\n",
    b"-NOGROUP No such key '{chasqui:q}:stream' or consumer group 'default'\r\n",
    b"-NOSCRIPT No matching script. Please use EVAL.\r\n",
    b"%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n$7\r\nmodules\r\n*0\r\n",
    b">3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$2\r\nhi\r\n+OK\r\n",
    b"|1\r\n+key-popularity\r\n%2\r\n$1\r\na\r\n,0.1923\r\n$1\r\nb\r\n,0.0012\r\n*2\r\n:20\r\n:95\r\n",
    b"~4\r\n+orange\r\n#t\r\n:100\r\n_\r\n",
    b"=15\r\ntxt:Some string\r\n(3492890328409238509324850943850943825024385\r\n",
    b"*2\r\n,inf\r\n,-1.5e-7\r\n",
)

#: The password of some URLs: no other part of one is it.
SECRET = "Kanari-7f3a"
_SCHEMES = (
    "redis",
    "rediss",
    "redis+sentinel",
    "redis+cluster",
    "unix",
    "embedded",
    "REDIS",
    "http",
)
_HOSTS = ("", "127.0.0.1", "a.example:6380", "[::1]", "[fe80::1]:7000", "ä.example", "a,b:1,c")
_PATHS = ("", "/", "/0", "/15", "/mymaster/2", "/run/redis.sock", "/%2Ftmp/x", "/a/b/c", "/dir/")
_QUERIES = ("", "", "?db=3", "?ssl_ca_certs=ca.pem", "?db=1&db=2", "?timeout=5", "#end")

_TEXTS = ("", "a", "mail", "send-report", "ünïcode", "報告", "x" * 31, "x" * 32, "n" * 256)
_BYTES = (b"", b"\xc0", b"\x00", b"\r\n", b"d", b"n", b"\x81\xa2to\xa3ada", b"\xff" * 9, b"p" * 300)
#: Around every width that an integer may have.
_NUMBERS = (
    *(0, 1, (1 << 64) - 1),
    *((1 << width) + off for width in (7, 8, 16, 31, 32, 63) for off in (-1, 0, 1)),
)
_DATES = ("2026-11-18", "0001-01-01", "9999-12-31", "2024-02-29", "20261118")
_MOMENTS = ("2026-11-18T03:16:03.000123", "0001-01-01T00:00:00", "1969-12-31 23:59", *_DATES)
_DECIMALS = ("12.50", "-0.01", "99999999.99", "1E+2", "0E-9", "-7", 7, 0.25)
#: By kind, what fits.
_FITTING: dict[str, tuple[object, ...]] = {
    "nothing": (None,),
    "bool": (True, False),
    "text": _TEXTS,
    "binary": (*_BYTES, "x"),
    "date": _DATES,
    "moment": tuple(one + zone for one in _MOMENTS[:2] for zone in ("Z", "+00:00", "-02:00", "")),
    "local": _MOMENTS,
    "clock": ("03:16:03", "23:59:59.999999", "03:16", "00:00:00.5"),
    "decimal": _DECIMALS,
}
_KINDS = (*_FITTING, "int8", "int16", "int32", "int64", "float", "double")


class Corpus:
    """Makes inputs of one seed: each method gives another one every time it is called."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def reply(self) -> bytes:
        """One or two replies of any type."""
        rng = self._rng
        if rng.random() < 0.1:
            return rng.choice(RECORDED)
        data = self._value(0)
        return data + self._value(0) if rng.random() < 0.2 else data

    def entries(self) -> bytes:
        """A byte that says how to read it (see targets.Entries), then a reply of stream entries."""
        rng = self._rng
        shape = rng.randrange(2)
        items = [self._entry() for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        data = _array(len(items)) + b"".join(items)
        if shape == 0:
            key = _bulk(b"{chasqui:q}:stream")
            data = (b"%1\r\n" if rng.random() < 0.5 else b"*1\r\n*2\r\n") + key + data
        elif rng.random() < 0.1:
            data = self._value(0)
        return bytes([shape + 2 * (rng.random() < 0.1)]) + data

    def columns(self) -> bytes:
        """A reply of stream entries as XRANGE gives them."""
        while (data := self.entries())[0] % 2 != 1:
            pass
        return data[1:]

    def arrow(self) -> bytes:
        """A column as Arrow lays it out (see columns.column_of)."""
        rng = self._rng
        kind, rows, offset = rng.randrange(9), rng.randrange(16), rng.randrange(4)
        flags = rng.choice((0, 0, 0, 1, 1, 2, 4))
        bits, last = (offset + rows + 7) // 8, offset + rows
        ends, total = [0], 0
        for _ in range(last):
            total += rng.choice((0, 1, 9, 31, 32, 40))
            ends.append(total)
        values = rng.randbytes(total if kind > 6 else 8 * last)
        head = bytes([kind, rows, offset, flags, bits, len(ends)])
        return head + rng.randbytes(bits) + struct.pack(f"={len(ends)}i", *ends) + values

    def envelope(self) -> bytes:
        """What our encoder writes; or in other widths, with more elements or a wrong one."""
        rng = self._rng
        id, payload = self._text(), self._payload()
        created, attempt = self._number(), self._number() & 0xFFFFFFFF
        retry = self._retry() if rng.random() < 0.5 else None
        if rng.random() < 0.4:
            encoded = None if retry is None else encode_retry(*retry)
            return encode_envelope(id, payload, created, attempt, encoded)
        parts: list[object] = [id, payload, created, attempt]
        if retry is not None or rng.random() < 0.3:
            parts.append(None if retry is None else list(retry))
            parts += [self._any(0) for _ in range(rng.choice((0, 0, 1, 3)))]
        if rng.random() < 0.3:
            parts[rng.randrange(len(parts))] = self._any(0)
        return self._pack(parts)

    def member(self) -> bytes:
        """A delayed member."""
        return encode_delayed_member(self._text(), self.envelope())

    # ── Words ──

    def url(self) -> bytes:
        """A URL of any kind, some with a password."""
        rng = self._rng
        user = rng.choice(("", "", f":{SECRET}@", f"ada:{SECRET}@", f"a%3Ab:{SECRET}@", "ada@"))
        parts = (rng.choice(_SCHEMES), "://", user, rng.choice(_HOSTS), rng.choice(_PATHS))
        return "".join((*parts, rng.choice(_QUERIES))).encode()

    def name(self) -> bytes:
        """What a queue or a job may be called, or nearly."""
        rng = self._rng
        word = rng.choice((*_TEXTS, "a:b/c-d_e.f", "{a}", "a}b", "a b", "q\n", "\u2028", "*?["))
        return (word * rng.choice((1, 1, 1, 2, 7, 9))).encode()

    # ── RESP ──

    def _value(self, depth: int) -> bytes:
        rng = self._rng
        kind = rng.randrange(20 if depth < 4 and rng.random() < 0.97 else 13)
        if kind >= 13:
            return self._aggregate(kind - 13, depth)
        makers: tuple[Callable[[], bytes], ...] = (
            lambda: b"$-1\r\n",
            lambda: b"*-1\r\n",
            lambda: b"_\r\n",
            lambda: b"#%c\r\n" % rng.choice(b"tf"),
            lambda: b":%d\r\n" % (self._number() & ((1 << 63) - 1)),
            lambda: b":-%d\r\n" % rng.randrange(1, 1 << 63),
            lambda: (
                b",%s\r\n"
                % rng.choice((b"0", b"-0", b"1.5", b"inf", b"-inf", b"nan", b"1e308", b"2e-320"))
            ),
            lambda: b"(%d\r\n" % (self._number() - self._number()),
            lambda: b"+%s\r\n" % self._text().encode(),
            lambda: b"-ERR %s\r\n" % self._text().encode(),
            lambda: b"=%d\r\ntxt:%s\r\n" % (4 + len(text := self._payload()), text),
            lambda: _bulk(self._payload()),
            lambda: _bulk(self._text().encode()),
        )
        return makers[kind]()

    def _aggregate(self, kind: int, depth: int) -> bytes:
        rng = self._rng
        count = rng.choice((0, 1, 1, 2, 3, 4))
        if kind < 3 or (kind > 4 and depth):  # out-of-band kinds are valid at the root only
            return _array(count) + b"".join(self._value(depth + 1) for _ in range(count))
        if kind == 3:
            return b"~%d\r\n" % count + b"".join(self._value(depth + 1) for _ in range(count))
        if kind == 5:
            return b">%d\r\n" % count + b"".join(self._value(depth + 1) for _ in range(count))
        pairs = b"".join(self._value(9) + self._value(depth + 1) for _ in range(count))
        if kind == 4:
            return b"%%%d\r\n" % count + pairs
        return b"|%d\r\n" % count + pairs + self._value(depth + 1)

    def _entry(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.05:
            return b"*-1\r\n"
        id = _bulk(b"%d-%d" % (self._number(), rng.randrange(9)))
        fields = []
        if rng.random() < 0.9:
            fields += [b"d", self.envelope()]
        if rng.random() < 0.5:
            fields += [b"n", self._text().encode()]
        if rng.random() < 0.2:
            fields += [rng.choice((b"d", b"n", b"reason", b"source_id")), self._payload()]
        if rng.random() < 0.2:
            number = rng.choice((b"-", b"")) + b"%d" % self._number()
            fields += [rng.choice((b"reason", b"source_id", b"skipped", b"x", b"\xff")), number]
        if rng.random() < 0.1:
            fields += [rng.choice((b"n", b"n", b"x")), b"01ARZ3NDEKTSV4RRFFQ69G5FAV"]
        body = _array(len(fields)) + b"".join(map(_bulk, fields))
        if rng.random() < 0.05:
            body = b"*-1\r\n"
        if rng.random() < 0.7:
            return _array(2) + id + body
        return _array(4) + id + body + b":%d\r\n:%d\r\n" % (rng.randrange(99999), rng.randrange(9))

    # ── msgpack ──

    def payload(self) -> bytes:
        """A value of any types, mostly such as a payload holds."""
        value = self._any(0)
        return self._pack({"to": value} if self._rng.random() < 0.7 else value)

    def typed(self) -> bytes:
        """A byte that chooses the shape (see targets.check_typed), then a map that mostly fits."""
        rng = self._rng
        place = rng.randrange(len(typed.NAMES))
        name = typed.NAMES[place]
        fields = {"beside": rng.choice((*_TEXTS, None)), name: self._fitting(name)}
        return bytes([place]) + self._pack(fields)

    def _fitting(self, kind: str) -> object:
        rng = self._rng
        if rng.random() < 0.05:
            return self._any(2)
        if kind == "list":
            inner = [{name: self._fitting(name) for name in rng.sample(_KINDS, 2)}, None, {}]
            return [inner[: rng.randrange(4)] for _ in range(rng.randrange(3))]
        if kind == "map":
            return {rng.choice(("7", "-8", "0", 9)): rng.choice(_TEXTS) for _ in range(2)}
        if kind == "dates":
            return {rng.choice(_DATES): {"x": rng.choice(_DECIMALS)} for _ in range(2)}
        if kind == "struct":
            return {"int8": rng.randrange(-128, 128), "": rng.choice(_BYTES), b"\xa1": "x"}
        return rng.choice((*_FITTING.get(kind, (0, -1, 1, 3.0)), None))

    def _retry(
        self,
    ) -> tuple[int | None, tuple[str, int, int | None, float | None, int | None] | None]:
        rng = self._rng
        attempts = rng.choice((None, 0, 1, 25, 0xFFFFFFFF))
        if rng.random() < 0.3:
            return attempts, None
        kind = rng.choice(("fixed", "exponential", "", "ünknown"))
        multiplier = rng.choice((None, 0.0, 1.5, 2.0, -1.0, 1e308, float("inf"), float("nan")))
        maximum, jitter = (rng.choice((None, self._number())) for _ in range(2))
        return attempts, (kind, self._number(), maximum, multiplier, jitter)

    def _any(self, depth: int) -> object:
        rng = self._rng
        if depth < 3 and rng.random() < 0.3:
            items = [self._any(depth + 1) for _ in range(rng.randrange(4))]
            return items if rng.random() < 0.5 else dict(enumerate(items))
        plain = (
            None,
            True,
            False,
            -1,
            -(1 << 63),
            1.5,
            self._number(),
            self._text(),
            self._payload(),
        )
        return rng.choice((*plain, _Ext(rng.randrange(-128, 128), rng.randbytes(rng.randrange(9)))))

    def _pack(self, value: object) -> bytes:
        """msgpack of any width that holds the value, not only the shortest."""
        if value is None:
            return b"\xc0"
        if isinstance(value, bool):
            return b"\xc3" if value else b"\xc2"
        if isinstance(value, int):
            return self._pack_int(value)
        if isinstance(value, float):
            return (
                struct.pack(">Bd", 0xCB, value) if self._rng.random() < 0.8 else b"\xca\x3f\xc0\0\0"
            )
        if isinstance(value, str):
            text = value.encode()
            return self._head(len(text), (0xA0, 32), (0xD9, 0xDA, 0xDB)) + text
        if isinstance(value, bytes):
            return self._head(len(value), None, (0xC4, 0xC5, 0xC6)) + value
        if isinstance(value, _Ext):
            return (
                self._head(len(value.data), None, (0xC7, 0xC8, 0xC9))
                + struct.pack("b", value.kind)
                + value.data
            )
        if isinstance(value, dict):
            items = [part for pair in value.items() for part in pair]
            return self._head(len(value), (0x80, 16), (None, 0xDE, 0xDF)) + b"".join(
                map(self._pack, items)
            )
        assert isinstance(value, list | tuple)
        return self._head(len(value), (0x90, 16), (None, 0xDC, 0xDD)) + b"".join(
            map(self._pack, value)
        )

    def _pack_int(self, value: int) -> bytes:
        if -32 <= value < 128 and self._rng.random() < 0.5:
            return struct.pack("b", value)
        signed = value < 0 or (value < 1 << 63 and self._rng.random() < 0.2)
        fits = [w for w in range(4) if -(1 << 8 * 2**w - signed) <= value < 1 << 8 * 2**w - signed]
        width = self._rng.choice(fits)
        return bytes([(0xD0 if signed else 0xCC) + width]) + value.to_bytes(
            2**width, "big", signed=signed
        )

    def _head(
        self, size: int, fixed: tuple[int, int] | None, wide: tuple[int | None, int, int]
    ) -> bytes:
        if fixed and size < fixed[1] and self._rng.random() < 0.6:
            return bytes([fixed[0] | size])
        fits = [w for w in range(3) if wide[w] is not None and size < 1 << 8 * 2**w]
        width = self._rng.choice(fits)
        return bytes([wide[width] or 0]) + size.to_bytes(2**width, "big")

    def _text(self) -> str:
        return self._rng.choice(_TEXTS)

    def _payload(self) -> bytes:
        return self._rng.choice(_BYTES)

    def _number(self) -> int:
        return self._rng.choice(_NUMBERS)


class _Ext:
    def __init__(self, kind: int, data: bytes) -> None:
        self.kind = kind
        self.data = data


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _array(count: int) -> bytes:
    return b"*%d\r\n" % count
