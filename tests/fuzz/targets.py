"""What must hold for every input, whatever its bytes: each target judged by another decoder.

`check` is a function of the input alone, so that a saved input fails again when replayed.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple
from zlib import crc32

import hiredis

from chasqui._core.entry import EntryBuilder
from chasqui._core.envelope import (
    EnvelopeError,
    decode_delayed_member,
    decode_envelope,
    encode_delayed_member,
)
from chasqui._core.payload import pack, unpack
from chasqui._core.reply import INCOMPLETE, Builder, ProtocolError, Push, ReplyError, ReplyReader
from tests.fuzz import columns, reference, typed, words
from tests.fuzz.corpus import Corpus
from tests.fuzz.mutate import MSGPACK, RESP, WORDS, Format


class WrongAnswerError(Exception):
    """The core took an input and gave something else than it must."""


class Target(NamedTuple):
    """One decoder of the core."""

    name: str
    format: Format
    make: Callable[[Corpus], bytes]
    check: Callable[[bytes], bool]  # True: accepted, False: refused; raises what is a bug


# ── Replies ──────────────────────────────────────────────────────────────────────────────────────

#: Refusals that are limits of ours; hiredis-py has none of them.
_LIMITS = ("Protocol error, a", "Max nesting depth", "Multi-bulk length out of range")
#: hiredis-py gives attributes as replies and big numbers as bytes.
_DIFFERENT = re.compile(rb"[|(]")
#: hiredis-py allocates what a header promises.
_PROMISE = re.compile(rb"[*~>%|][0-9]{5}")
_MAP = re.compile(rb"%([0-9]+)\r\n")
_REPLY_ERROR: Any = ReplyError  # hiredis-py takes any callable, its stub wants an exception
_BYTEWISE_LIMIT = 256


def check_reply(data: bytes) -> bool:
    """The same objects however the bytes are cut, and those of hiredis-py."""
    mark = crc32(data)
    replies, refusal = read((data,))
    cut_replies, cut_refusal = read(cut(data, mark))
    if (refusal is None) != (cut_refusal is None) or not same(replies, cut_replies, mark):
        raise WrongAnswerError(
            f"whole: {replies!r}, {refusal}\nin pieces: {cut_replies!r}, {cut_refusal}"
        )
    if not _PROMISE.search(data):
        _compare_with_hiredis(data, replies, refusal, mark)
    return refusal is None and bool(replies)


def _compare_with_hiredis(data: bytes, replies: list[Any], refusal: str | None, mark: int) -> None:
    theirs, their_refusal = read_with_hiredis(data)
    if refusal is None or not refusal.startswith(_LIMITS):
        if refusal is not None and their_refusal is None:
            raise WrongAnswerError(f"hiredis-py reads {theirs!r}, we say {refusal}")
        if len(theirs) > len(replies) and not _DIFFERENT.search(data):
            raise WrongAnswerError(f"hiredis-py reads {theirs!r}, we only {replies!r}")
    if _DIFFERENT.search(data):
        return
    common = min(len(theirs), len(replies))
    if not same(replies[:common], theirs[:common], mark) and not _has_twin_keys(data, replies):
        raise WrongAnswerError(f"hiredis-py reads {theirs!r}, we read {replies!r}")
    for ours, their in zip(replies, theirs, strict=False):
        if isinstance(ours, Push) != isinstance(their, hiredis.PushNotification):
            raise WrongAnswerError(f"hiredis-py reads {type(their)}, we read {type(ours)}")


def _has_twin_keys(data: bytes, replies: list[Any]) -> bool:
    """Whether a map may have had a key twice: hiredis-py puts the next value elsewhere then."""
    promised = sum(int(size) for size in _MAP.findall(data))
    return promised != _count_pairs(replies)


def _count_pairs(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(_count_pairs, value.values()))
    return sum(map(_count_pairs, value)) if isinstance(value, list) else 0


def read(chunks: Iterable[bytes], builder: Builder | None = None) -> tuple[list[Any], str | None]:
    """Every reply in the chunks, and why the rest was refused."""
    reader = ReplyReader()
    replies: list[Any] = []
    try:
        for chunk in chunks:
            reader.feed(chunk)
            while (reply := reader.read(builder)) is not INCOMPLETE:
                replies.append(reply)
    except ProtocolError as error:
        return replies, str(error)
    return replies, None


def read_with_hiredis(data: bytes) -> tuple[list[Any], str | None]:
    reader = hiredis.Reader(replyError=_REPLY_ERROR, notEnoughData=INCOMPLETE)
    reader.feed(data)
    replies: list[Any] = []
    try:
        while (reply := reader.gets()) is not INCOMPLETE:
            replies.append(reply)
    except (hiredis.ProtocolError, TypeError) as error:  # TypeError: an aggregate as a map's key
        return replies, str(error)
    return replies, None


def cut(data: bytes, mark: int) -> list[bytes]:
    """The input in two or three pieces, or in as many as it has bytes."""
    if mark & 15 == 0 and len(data) <= _BYTEWISE_LIMIT:
        return [data[i : i + 1] for i in range(len(data))]
    size = len(data) + 1
    first, second = sorted(((mark >> 4) % size, (mark >> 16) % size))
    return [data[:first], data[first:second], data[second:]]


def same(ours: Any, theirs: Any, mark: int) -> bool:
    """Equal; now and then also in their text, which tells 1 from True and 1.0."""
    if ours == theirs:
        return mark & 0x70 != 0 or repr(ours) == repr(theirs)
    return repr(ours) == repr(theirs)  # NaN is equal to nothing


# ── Entries ──────────────────────────────────────────────────────────────────────────────────────

_SHAPES: Final[tuple[Literal["streams", "range"], ...]] = ("streams", "range")
#: Types that a plain reply does not tell from an array, a bulk string or an integer.
_AMBIGUOUS = re.compile(rb"^[~|]|(?!^)[+=~%>|(]")


def check_entries(data: bytes) -> bool:
    """The first byte chooses shape and size limit; the entries are those of the plain reply."""
    control, data = data[0] if data else 0, data[1:]
    shape, limit = _SHAPES[control % 2], 16 if control // 2 % 2 else 1 << 20
    mark = crc32(data)
    builder = EntryBuilder(shape, limit)
    found, refusal = read((data,), builder)
    replies = [reference.from_entries(reply) for reply in found]
    _check_still_usable(builder)
    cut_found, cut_refusal = read(cut(data, mark), EntryBuilder(shape, limit))
    cut_replies = [reference.from_entries(reply) for reply in cut_found]
    if (refusal is None) != (cut_refusal is None) or not same(replies, cut_replies, mark):
        raise WrongAnswerError(
            f"{shape}, whole: {replies!r}, {refusal}\nin pieces: {cut_replies!r}, {cut_refusal}"
        )
    plain, plain_refusal = read((data,))
    if plain_refusal is not None and refusal is None:
        raise WrongAnswerError(f"{shape}: accepted what is refused as {plain_refusal}")
    is_ambiguous = _AMBIGUOUS.search(data) is not None
    for got, reply in zip(replies, plain, strict=False):
        expected = reference.entries(shape, reply, limit)
        if same(got, expected, mark) or (is_ambiguous and same(got, reply, mark)):
            continue
        if not (isinstance(reply, dict) and _has_twin_keys(data, plain)):
            raise WrongAnswerError(f"{shape}: {got!r}, expected {expected!r} from {reply!r}")
    if len(plain) > len(replies) and not is_ambiguous:
        expected = reference.entries(shape, plain[len(replies)], limit)
        if expected is not reference.MISSHAPEN:
            raise WrongAnswerError(f"{shape}: {refusal}, expected {expected!r}")
    return refusal is None and bool(replies)


def _check_still_usable(builder: EntryBuilder) -> None:
    """The reader is gone, maybe in the middle of a reply: the next one gets its own reply."""
    replies, refusal = read((b"-ERR x\r\n",), builder)
    if refusal is not None or replies != [ReplyError("ERR x")]:
        raise WrongAnswerError(f"{builder.shape}: the next reader gets {replies!r}, {refusal}")


# ── Columns ──────────────────────────────────────────────────────────────────────────────────────


def check_columns(data: bytes) -> bool:
    """The rows are those of the plain reply, and a builder that was left in the middle of a reply
    keeps what it has gathered before."""
    mark = crc32(data)
    builder = columns.builder()
    found, refusal = read((data,), builder)
    rows = columns.rows_of(builder.take())
    pieces = columns.builder()
    again, cut_refusal = read(cut(data, mark), pieces)
    if (refusal is None) != (cut_refusal is None) or not same(found, again, mark):
        raise WrongAnswerError(f"whole: {found!r}\nin pieces: {again!r}, {cut_refusal}")
    read((b"*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nn\r\n$1\r\nx\r\n",), pieces)
    if not same(rows, columns.rows_of(pieces.take())[: len(rows)], mark):
        raise WrongAnswerError(f"{rows!r} whole, and something else in pieces")
    plain, _ = read((data,))
    is_ambiguous = _AMBIGUOUS.search(data) is not None
    expected = list[Any]()
    for got, reply in zip(found, plain, strict=False):
        wanted = columns.rows_from(reply)
        if type(got) is not tuple:
            if not same(got, reply, mark) and not _has_twin_keys(data, plain):
                raise WrongAnswerError(f"{got!r} from {reply!r}")
            continue
        if wanted is reference.MISSHAPEN:
            raise WrongAnswerError(f"accepted {reply!r}")
        expected += wanted
    if not same(rows, expected, mark) and not (is_ambiguous and _has_twin_keys(data, plain)):
        raise WrongAnswerError(f"{rows!r}, expected {expected!r}")
    if len(plain) > len(found) and not is_ambiguous:
        wanted = columns.rows_from(plain[len(found)])
        if wanted is not reference.MISSHAPEN:
            raise WrongAnswerError(f"{refusal}, expected {wanted!r}")
    return refusal is None and bool(found)


def check_maps(data: bytes) -> bool:
    """Packed exactly when all buffers hold what they promise, and as msgpack packs it."""
    packed, expected = columns.packed(data), columns.maps_of(data)
    if packed != expected and not _are_nans(packed, expected):
        raise WrongAnswerError(f"{packed!r}, expected {expected!r}")
    return packed is not None


def _are_nans(packed: list[bytes] | None, expected: list[bytes] | None) -> bool:
    """Whether they differ in the bits of NaN only, of which a conversion may set some."""
    if packed is None or expected is None:
        return False
    return repr([unpack(one) for one in packed]) == repr([unpack(one) for one in expected])


# ── Envelopes and delayed members ────────────────────────────────────────────────────────────────


def check_envelope(data: bytes) -> bool:
    """Accepted exactly when msgpack decodes it to a valid shape, with the same parts."""
    expected = reference.envelope(data)
    try:
        envelope = decode_envelope(data)
    except EnvelopeError as error:
        if isinstance(expected, tuple):
            raise WrongAnswerError(f"refused ({error}), expected {expected!r}") from None
        return False
    parts = reference.parts(envelope)
    if expected is not reference.UNKNOWN and repr(parts) != repr(expected):
        raise WrongAnswerError(f"{parts!r}, expected {expected!r}")
    attempt = crc32(data) >> (crc32(data) & 31)
    again = reference.parts(decode_envelope(envelope.with_attempt(attempt)))
    if repr(again) != repr(parts._replace(attempt=attempt)):
        raise WrongAnswerError(f"with attempt {attempt}: {again!r} from {parts!r}")
    return True


def check_member(data: bytes) -> bool:
    """Decoded and encoded again it is the same; refused only if short or if its name is no text."""
    try:
        name, envelope = decode_delayed_member(data)
    except EnvelopeError as error:
        if _is_member(data):
            raise WrongAnswerError(f"refused ({error}) for no reason") from None
        return False
    if not _is_member(data) or encode_delayed_member(name, envelope) != data:
        raise WrongAnswerError(f"{name!r}, {envelope!r} is not what it came from")
    try:
        decode_envelope(envelope)
    except EnvelopeError:
        return False
    return True


def _is_member(data: bytes) -> bool:
    if len(data) < 4:
        return False
    size = int.from_bytes(data[:4], "little")
    try:
        return len(data[4 : 4 + size].decode().encode()) == size
    except UnicodeDecodeError:
        return False


# ── Payloads ─────────────────────────────────────────────────────────────────────────────────────


def check_payload(data: bytes) -> bool:
    """Accepted exactly when msgpack decodes it to plain values; packed as msgpack does."""
    expected = reference.payload(data)
    try:
        value = unpack(data)
    except ValueError as error:
        if expected is not reference.MISSHAPEN:
            raise WrongAnswerError(f"refused ({error}), expected {expected!r}") from None
        return False
    if repr(value) != repr(expected):
        raise WrongAnswerError(f"{value!r}, expected {expected!r}")
    packed = pack(value, 1 << 20)
    if packed != reference.packed(value):
        raise WrongAnswerError(f"{value!r} is packed as {packed!r}")
    return True


def check_typed(data: bytes) -> bool:
    """The first byte chooses the shape. Each row is read as Python reads it, whatever is between
    two that fit; packed and read again it is the same."""
    shape, data = typed.SHAPES[(data[0] if data else 0) % len(typed.SHAPES)], data[1:]
    unpacked, rows = typed.rows_around(shape, data)
    expected = typed.rows_expected(shape, data)
    if repr(rows) != repr(expected):
        raise WrongAnswerError(f"{rows!r}, expected {expected!r}")
    is_fit = rows[1] is not typed.MISFIT
    if is_fit and repr(again := typed.rows_again(shape, unpacked)) != repr(rows):
        raise WrongAnswerError(f"{rows!r}, and {again!r} after it was packed")
    typed.pack_harmed(shape, unpacked, crc32(data))
    return is_fit


TARGETS = {
    target.name: target
    for target in (
        Target("reply", RESP, Corpus.reply, check_reply),
        Target("entries", RESP, Corpus.entries, check_entries),
        Target("envelope", MSGPACK, Corpus.envelope, check_envelope),
        Target("member", MSGPACK, Corpus.member, check_member),
        Target("payload", MSGPACK, Corpus.payload, check_payload),
        Target("columns", RESP, Corpus.columns, check_columns),
        Target("maps", MSGPACK, Corpus.arrow, check_maps),
        Target("typed", MSGPACK, Corpus.typed, check_typed),
        Target("url", WORDS, Corpus.url, words.check_url),
        Target("name", WORDS, Corpus.name, words.check_name),
    )
}
