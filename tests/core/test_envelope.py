"""Envelopes and delayed members against the msgpack library, both ways."""

import math
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chasqui._core.envelope import (
    Envelope,
    EnvelopeError,
    check_msgpack,
    decode_delayed_member,
    decode_envelope,
    encode_delayed_member,
    encode_envelope,
    encode_retry,
)

UNSIGNED = "an unsigned integer was expected"
EDGES = [n + d for n in (0, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63) for d in (-1, 0, 1)]
U32 = st.integers(0, 2**32 - 1) | st.sampled_from([n for n in EDGES if 0 <= n < 2**32])
U64 = st.integers(0, 2**64 - 1) | st.sampled_from([n for n in EDGES if n >= 0] + [2**64 - 1])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
PAYLOAD = st.binary(max_size=300)
BACKOFF = st.tuples(
    st.sampled_from(["fixed", "exponential"]) | TEXT,
    U64,
    st.none() | U64,
    st.none() | st.floats(allow_nan=False),
    st.none() | U64,
)
RETRY = st.tuples(st.none() | U32, st.none() | BACKOFF)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | PAYLOAD
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
    lambda values: st.lists(values, max_size=20) | st.dictionaries(TEXT, values, max_size=20),
    max_leaves=20,
)  # fmt: skip


def seen(envelope: Envelope) -> tuple[Any, ...]:
    parts = (envelope.id, envelope.payload, envelope.created_at_ms, envelope.attempt)
    return *parts, envelope.retry


def meant(retry: tuple[Any, Any] | None) -> tuple[Any, Any] | None:
    """An override that overrides nothing is none."""
    return None if retry == (None, None) else retry


def wide_int(number: int, pick: int) -> bytes:
    """An integer in one of the forms that can hold it, the shortest or not."""
    forms = [bytes([number])] if number < 0x80 else []
    for width, kind in ((1, 0xCC), (2, 0xCD), (4, 0xCE), (8, 0xCF)):
        if number < 1 << 8 * width:
            forms.append(bytes([kind]) + number.to_bytes(width, "big"))
        if number < 1 << 8 * width - 1:
            forms.append(bytes([kind + 4]) + number.to_bytes(width, "big"))
    return forms[pick % len(forms)]


def wide_run(kinds: tuple[int, ...], data: bytes, pick: int) -> bytes:
    """A str or bin in one of the forms that can hold it."""
    forms = [bytes([0xA0 | len(data)])] if kinds[0] == 0xD9 and len(data) < 32 else []
    for width, kind in zip((1, 2, 4), kinds, strict=True):
        if len(data) < 1 << 8 * width:
            forms.append(bytes([kind]) + len(data).to_bytes(width, "big"))
    return forms[pick % len(forms)] + data


@given(TEXT, PAYLOAD, U64, U32, st.none() | RETRY)
@example("i" * 70_000, b"p" * 70_000, 0, 0, None)
@example("i" * 32, b"p" * 256, 2**64 - 1, 2**32 - 1, (2**32 - 1, ("k" * 255, 0, 0, 0.5, 0)))
@example("", b"", 0, 0, (None, None))
def test_encoder_writes_what_msgpack_writes(id, payload, created_at_ms, attempt, retry):
    encoded = encode_envelope(
        *(id, payload, created_at_ms, attempt, None if retry is None else encode_retry(*retry))
    )
    elements = [id, payload, created_at_ms, attempt, *([] if retry is None else [retry])]
    assert encoded == msgpack.packb(elements)
    assert seen(decode_envelope(encoded)) == (id, payload, created_at_ms, attempt, meant(retry))


@given(TEXT, PAYLOAD, U64, U32, st.none() | RETRY, st.lists(VALUES, max_size=3))
def test_decoder_reads_what_msgpack_writes(id, payload, created_at_ms, attempt, retry, unknown):
    encoded = msgpack.packb([id, payload, created_at_ms, attempt, retry, *unknown])
    envelope = decode_envelope(encoded)
    assert seen(envelope) == (id, payload, created_at_ms, attempt, meant(retry))
    changed = envelope.with_attempt(2**32 - 1)
    assert changed == msgpack.packb([id, payload, created_at_ms, 2**32 - 1, retry, *unknown])


@given(TEXT, PAYLOAD, U64, U32, st.integers(0, 2), *[st.integers(0, 99)] * 5)
def test_decoder_takes_every_width(id, payload, created_at_ms, attempt, header, a, b, c, d, e):
    encoded = (b"\x95", b"\xdc\0\x05", b"\xdd\0\0\0\x05")[header] + b"".join(
        [
            wide_run((0xD9, 0xDA, 0xDB), id.encode(), a),
            wide_run((0xC4, 0xC5, 0xC6), payload, b),
            wide_int(created_at_ms, c),
            wide_int(attempt, d),
            b"\x92" + wide_int(attempt, e) + b"\xc0",
        ]
    )
    expected = (id, payload, created_at_ms, attempt, (attempt, None))
    assert seen(decode_envelope(encoded)) == expected
    assert msgpack.unpackb(encoded) == [*expected[:4], [attempt, None]]


@pytest.mark.slow
@given(RETRY, st.lists(VALUES, max_size=2), st.lists(VALUES, max_size=2))
def test_what_a_newer_peer_puts_behind_retry_and_backoff_is_ignored(retry, more, further):
    max_attempts, backoff = retry
    spec = [max_attempts, None if backoff is None else [*backoff, *further], *more]
    assert decode_envelope(msgpack.packb(["id", b"", 0, 0, spec])).retry == meant(retry)


@pytest.mark.parametrize("multiplier", [2, 2.5, math.inf])
@pytest.mark.parametrize("single", [False, True])
def test_a_multiplier_may_be_any_number(multiplier: float, single: bool):
    spec = [1, ["exponential", 1, None, multiplier, None]]
    encoded = msgpack.packb(["id", b"", 0, 0, spec], use_single_float=single)
    assert decode_envelope(encoded).retry[1][3] == multiplier


def test_short_retries_and_backoffs_are_filled_up():
    assert decode_envelope(msgpack.packb(["id", b"", 0, 0, []])).retry is None
    assert decode_envelope(msgpack.packb(["id", b"", 0, 0, [3]])).retry == (3, None)
    short = decode_envelope(msgpack.packb(["id", b"", 0, 0, [None, ["fixed", 5]]]))
    assert short.retry == (None, ("fixed", 5, None, None, None))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({}, "an array was expected (at byte 0)"),
        (["id", b"", 0], "an envelope has at least 4 elements (at byte 0)"),
        ([1, b"", 0, 0], "id: a str was expected (at byte 1)"),
        ([b"id", b"", 0, 0], "id: a str was expected (at byte 1)"),
        (["id", "", 0, 0], "payload: a bin was expected (at byte 4)"),
        (["id", b"", -1, 0], "created_at_ms: an unsigned integer was expected (at byte 6)"),
        (["id", b"", -1000, 0], "created_at_ms: an unsigned integer was expected (at byte 6)"),
        (["id", b"", 1.0, 0], "created_at_ms: an unsigned integer was expected (at byte 6)"),
        (["id", b"", 0, None], "attempt: an unsigned integer was expected (at byte 7)"),
        (["id", b"", 0, 2**32], "attempt: beyond 32 bits (at byte 7)"),
        (["id", b"", 0, 0, 1], "retry: an array was expected (at byte 8)"),
        (["id", b"", 0, 0, ["1"]], "max_attempts: an unsigned integer was expected (at byte 9)"),
        (["id", b"", 0, 0, [2**32]], "max_attempts: beyond 32 bits (at byte 9)"),
        (["id", b"", 0, 0, [1, 1]], "backoff: an array was expected (at byte 10)"),
        (["id", b"", 0, 0, [1, ["f"]]], "backoff: at least kind and delay_ms (at byte 10)"),
        (["id", b"", 0, 0, [1, [1, 1]]], "backoff kind: a str was expected (at byte 11)"),
        (["id", b"", 0, 0, [1, ["f", -1]]], f"delay_ms: {UNSIGNED} (at byte 13)"),
        (["id", b"", 0, 0, [1, ["f", 1, ""]]], f"max_delay_ms: {UNSIGNED} (at byte 14)"),
        (["id", b"", 0, 0, [1, ["f", 1, 1, ""]]], "multiplier: a float was expected (at byte 15)"),
        (["id", b"", 0, 0, [1, ["f", 1, 1, 1, ""]]], f"jitter_ms: {UNSIGNED} (at byte 16)"),
    ],
)  # fmt: skip
def test_the_error_says_what_was_wrong_and_where(value: Any, why: str):
    with pytest.raises(EnvelopeError) as raised:
        decode_envelope(msgpack.packb(value))
    assert str(raised.value) == why


@pytest.mark.fault(43)
@pytest.mark.parametrize(
    "id", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"a\x80"]
)
def test_ids_and_kinds_are_strict_utf8(id: bytes):
    text = bytes([0xA0 | len(id)]) + id
    with pytest.raises(EnvelopeError, match="id: not UTF-8"):
        decode_envelope(b"\x94" + text + b"\xc4\x00\x00\x00")
    with pytest.raises(EnvelopeError, match="kind: not UTF-8"):
        decode_envelope(b"\x95\xa1i\xc4\x00\x00\x00\x92\xc0\x92" + text + b"\x00")


@given(st.binary(max_size=8))
def test_utf8_is_what_python_takes(text: bytes):
    envelope = b"\x94" + bytes([0xA0 | len(text)]) + text + b"\xc4\x00\x00\x00"
    try:
        expected = text.decode()
    except UnicodeDecodeError:
        with pytest.raises(EnvelopeError, match="not UTF-8"):
            decode_envelope(envelope)
    else:
        assert decode_envelope(envelope).id == expected


@pytest.mark.fault(41)
@given(TEXT, PAYLOAD, U64, U32, st.none() | RETRY)
def test_an_envelope_cut_anywhere_or_followed_by_anything_is_refused(id, payload, ms, n, retry):
    encoded = msgpack.packb([id, payload, ms, n, *([] if retry is None else [retry])])
    for cut in range(len(encoded)):
        with pytest.raises(EnvelopeError):
            decode_envelope(encoded[:cut])
    with pytest.raises(EnvelopeError, match="bytes after the envelope"):
        decode_envelope(encoded + b"\xc0")


@given(VALUES)
def test_check_accepts_what_msgpack_writes_unless_it_holds_ext(value):
    encoded = msgpack.packb(value)
    if "ExtType" in repr(value):
        with pytest.raises(EnvelopeError, match="ext types are not allowed"):
            check_msgpack(encoded)
    else:
        check_msgpack(encoded)
        check_msgpack(memoryview(encoded))
        for cut in range(len(encoded)):
            with pytest.raises(EnvelopeError):
                check_msgpack(encoded[:cut])


@pytest.mark.fault(41)
@pytest.mark.fault(42)
@given(st.binary(max_size=200))
@example(b"\xdd\xee\xee\xee\xee")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\x95\xdb\xff\xff\xff\xff")
@example(b"\x91" * 5000)
@example(b"\x94\xa1i\xc6\xff\xff\xff\xff")
def test_arbitrary_bytes_are_read_or_refused_and_nothing_is_allocated_on_their_word(noise):
    for decode in (decode_envelope, decode_delayed_member, check_msgpack):
        tracemalloc.start()
        try:
            try:
                answer = decode(noise)
            except EnvelopeError as error:
                answer = str(error)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= 4 * len(noise) + 6000, answer
    try:
        check_msgpack(noise)
    except EnvelopeError:
        return
    unpacker = msgpack.Unpacker(strict_map_key=False, unicode_errors="surrogateescape")
    unpacker.feed(noise)
    unpacker.skip()
    assert unpacker.tell() == len(noise)


@pytest.mark.fault(42)
def test_depth_is_capped():
    check_msgpack(b"\x91" * 128 + b"\xc0")
    check_msgpack(b"\x91" * 3 + b"\xc0", 3)
    for data, depth in ((b"\x91" * 129 + b"\xc0", 128), (b"\x81\xc0" * 4 + b"\xc0", 3)):
        with pytest.raises(EnvelopeError, match="nested too deeply"):
            check_msgpack(data, depth)
    with pytest.raises(EnvelopeError, match="nested too deeply"):
        decode_envelope(b"\x96\xa1i\xc4\x00\x00\x00\xc0" + b"\x91" * 129 + b"\xc0")
    for depth in (0, 129, -1):
        with pytest.raises(ValueError, match="max_depth"):
            check_msgpack(b"\xc0", depth)


@given(TEXT, PAYLOAD)
def test_delayed_member_is_the_name_with_its_length_and_the_envelope(name, envelope):
    member = encode_delayed_member(name, envelope)
    text = name.encode()
    assert member == len(text).to_bytes(4, "little") + text + envelope
    assert decode_delayed_member(member) == (name, envelope)
    for cut in range(4 + len(text)):
        with pytest.raises(EnvelopeError, match="delayed member"):
            decode_delayed_member(member[:cut])


def test_delayed_member_with_a_broken_name():
    with pytest.raises(EnvelopeError, match="not UTF-8 at byte 5"):
        decode_delayed_member(b"\x02\0\0\0a\xff")
    with pytest.raises(EnvelopeError, match="promises a name of 4294967295 bytes and has 0 left"):
        decode_delayed_member(b"\xff" * 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: encode_envelope("\ud800", b"", 0),
        lambda: encode_envelope("id", b"", -1),
        lambda: encode_envelope("id", b"", 2**64),
        lambda: encode_envelope("id", b"", 0, 2**32),
        lambda: encode_envelope("id", b"", 0, -1),
        lambda: encode_envelope(None, b"", 0),
        lambda: encode_envelope("id", bytearray(), 0),
        lambda: encode_envelope("id", None, 0),
        lambda: encode_retry(2**32),
        lambda: encode_retry(1, ("k" * 256, 1, None, None, None)),
        lambda: encode_retry(1, ("k", -1, None, None, None)),
        lambda: encode_retry(1, ("k", 1, 2**64, None, None)),
        lambda: encode_retry(1, ("k", 1, None, "x", None)),
        lambda: encode_retry(1, (b"k", 1, None, None, None)),
        lambda: encode_retry(1, ("k", 1)),
        lambda: encode_delayed_member("\ud800", b""),
        lambda: encode_delayed_member("n", None),
        lambda: decode_envelope(None),
        lambda: decode_envelope(bytearray(b"\x94")),
        lambda: decode_delayed_member(None),
        lambda: decode_envelope(encode_envelope("id", b"", 0)).with_attempt(2**32),
        lambda: Envelope().with_attempt(1),
        lambda: check_msgpack("text"),
    ],
)
def test_arguments_out_of_range_are_errors(call):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        call()
