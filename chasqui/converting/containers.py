"""Lists, tuples, sets and dicts. Those of native values are checked in place and not copied."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from chasqui.converting.converter import (
    Convert,
    Converter,
    Unsupported,
    key_step,
    malformed,
    mismatch,
    mismatched,
)
from chasqui.converting.scalars import ANY, INT_MAX, INT_MIN
from chasqui.errors import ConversionError

_LIST: Final = frozenset((list,))
_MAP: Final = frozenset((dict,))
#: Sequences of themselves: where a sequence of texts is asked for, one text is a mistake.
_TEXTS: Final = (str, bytes, bytearray, memoryview)


# Items in a row


def each(convert: Convert, items: Iterable[Any]) -> list[Any]:
    """Each item converted; an error names the index."""
    out: list[Any] = []
    append = out.append
    try:
        for item in items:
            append(convert(item))
    except ConversionError as error:
        error.within(f"[{len(out)}]")
        raise
    return out


def _check_each(item: Converter, check: Convert) -> Callable[[Any], None]:
    """Checks each native item; the usual types without a call for each."""
    scalar = item.scalar
    if item is ANY:
        return lambda items: None

    def check_int(items: Any) -> None:
        for value in items:
            if type(value) is not int or not INT_MIN <= value <= INT_MAX:
                each(check, items)
                return

    def check_scalar(items: Any) -> None:
        for value in items:
            if type(value) is not scalar:
                each(check, items)
                return

    def check_other(items: Any) -> None:
        each(check, items)

    if scalar is None:
        return check_other
    return check_int if scalar is int and check is item.encoder else check_scalar


def list_converter(item: Converter) -> Converter:
    expected = "a list"
    if item.is_native:
        check_encoded = _check_each(item, item.encoder)
        check_decoded = _check_each(item, item.decoder)

        def encode_native(value: Any) -> Any:
            if not isinstance(value, list):
                mismatch(expected, value)
            check_encoded(value)
            return value

        def decode_native(value: Any) -> Any:
            if type(value) is not list:
                mismatch(expected, value)
            check_decoded(value)
            return value

        return Converter(expected, _LIST, (list,), encode_native, decode_native, is_native=True)

    def encode(value: Any) -> Any:
        return each(item.encoder, value) if isinstance(value, list) else mismatch(expected, value)

    return Converter(expected, _LIST, (list,), encode, _decode_list(item, expected))


def iterable_converter(kind: Any, item: Converter) -> Converter:
    """An abstract container: any of its kind goes in, a list comes out."""
    expected = f"{'an' if kind.__name__ == 'Iterable' else 'a'} {kind.__name__}"
    in_order = _sorting(item)

    def encode(value: Any) -> Any:
        if not isinstance(value, kind) or isinstance(value, _TEXTS):
            mismatch(expected, value)
        items = each(item.encoder, value)
        return in_order(items) if isinstance(value, (set, frozenset)) else items

    return Converter(expected, _LIST, (kind,), encode, _decode_list(item, "a list"))


def _decode_list(item: Converter, expected: str) -> Convert:
    if item is ANY:
        return lambda value: value if type(value) is list else mismatch(expected, value)

    def decode(value: Any) -> Any:
        return each(item.decoder, value) if type(value) is list else mismatch(expected, value)

    return decode


def set_converter(kind: Any, made: type, item: Converter) -> Converter:
    """A set, which travels as a list: sorted where that always works, so that bytes are stable."""
    expected = f"a {kind.__name__}"
    in_order = _sorting(item)

    def encode(value: Any) -> Any:
        if not isinstance(value, kind):
            mismatch(expected, value)
        return in_order(each(item.encoder, value))

    def decode(value: Any) -> Any:
        if type(value) is not list:
            mismatch("a list", value)
        try:
            return made(each(item.decoder, value))
        except ConversionError:
            raise
        except TypeError:
            raise ConversionError(
                "", "a list of values that a set can hold", "another one"
            ) from None

    return Converter(expected, _LIST, (kind,), encode, decode)


def _sorting(item: Converter) -> Callable[[list[Any]], list[Any]]:
    if item.kinds in (frozenset((str,)), frozenset((int,))):
        return sorted
    return lambda items: items


def tuple_converter(item: Converter) -> Converter:
    """`tuple[X, ...]`."""

    def encode(value: Any) -> Any:
        return each(item.encoder, value) if isinstance(value, tuple) else mismatch("a tuple", value)

    def decode(value: Any) -> Any:
        if type(value) is not list:
            mismatch("a list", value)
        return tuple(each(item.decoder, value))

    return Converter("a tuple", _LIST, (tuple,), encode, decode)


def row_converter(items: list[Converter]) -> Converter:
    """`tuple[X, Y]`: a converter for each place."""
    length = len(items)
    expected = f"a tuple of {length}"
    encoders = [item.encoder for item in items]
    decoders = [item.decoder for item in items]

    def encode(value: Any) -> Any:
        if not isinstance(value, tuple):
            mismatch(expected, value)
        if len(value) != length:
            raise ConversionError("", expected, f"a tuple of {len(value)}")
        return row(encoders, value)

    def decode(value: Any) -> Any:
        if type(value) is not list:
            mismatch(f"a list of {length}", value)
        if len(value) != length:
            raise ConversionError("", f"a list of {length}", f"a list of {len(value)}")
        return tuple(row(decoders, value))

    return Converter(expected, _LIST, (tuple,), encode, decode)


def row(converts: list[Convert], values: Iterable[Any]) -> list[Any]:
    """Each value by the converter of its place; the row may be shorter than the converters."""
    out: list[Any] = []
    append = out.append
    try:
        for convert, value in zip(converts, values, strict=False):
            append(convert(value))
    except ConversionError as error:
        error.within(f"[{len(out)}]")
        raise
    return out


# Keys and values


def dict_converter(annotation: object, kind: type, key: Converter, value: Converter) -> Converter:
    """A dict, or an abstract mapping, which comes back as a dict."""
    expected = "a dict" if kind is dict else f"a {kind.__name__}"
    if kind is dict and value.is_native and (key is ANY or key.scalar is str):
        return _native_dict(expected, key, value)
    encode_key, decode_key = _key_functions(annotation, key)
    encode_value, decode_value = value.encoder, value.decoder

    def converting(of_key: Convert, of_value: Convert, taken: Any, text: str) -> Convert:
        def convert(given: Any) -> Any:
            if not isinstance(given, taken):
                mismatch(text, given)
            out = {}
            name: Any = None
            try:
                for name, item in given.items():
                    out[of_key(name)] = of_value(item)
            except ConversionError as error:
                error.within(key_step(name))
                raise
            return out

        return convert

    return Converter(
        expected,
        _MAP,
        (kind,),
        converting(encode_key, encode_value, kind, expected),
        converting(decode_key, decode_value, dict, "a dict"),
    )


def _native_dict(expected: str, key: Converter, value: Converter) -> Converter:
    def checking(check_value: Convert) -> Convert:
        def check(given: Any) -> Any:
            if not isinstance(given, dict):
                mismatch(expected, given)
            if key is not ANY:
                for name in given:
                    if type(name) is not str and not isinstance(name, str):
                        raise _of_key(mismatched("a str", name)).within(key_step(name))
            if value is ANY:
                return given
            name = None
            try:
                for name, item in given.items():  # noqa: B007, the error needs it
                    check_value(item)
            except ConversionError as error:
                error.within(key_step(name))
                raise
            return given

        return check

    return Converter(
        expected,
        _MAP,
        (dict,),
        checking(value.encoder),
        checking(value.decoder),
        is_native=True,
    )


def _of_key(error: ConversionError) -> ConversionError:
    """The error of a key: the path leads to its value, so the words say that it is the key."""
    return ConversionError("", f"under a key that is {error.expected}", error.got)


def _key_functions(annotation: object, key: Converter) -> tuple[Convert, Convert]:
    """What turns keys into text and back: ints become text, since payloads have no keys of int."""
    if key is ANY:
        return key.encoder, key.decoder
    if key.kinds == frozenset((str,)):
        return _key_function(key.encoder), _key_function(key.decoder)
    if key.kinds != frozenset((int,)):
        raise Unsupported(
            annotation,
            f"has keys that are {key.expected}, which is neither text nor an int on the wire; "
            "annotate a list of pairs, list[tuple[K, V]]",
        )

    def encode(value: Any) -> str:
        return int.__repr__(key.encoder(value))  # of a bool too, whose str() is "True"

    def decode(value: Any) -> Any:
        if not isinstance(value, str):
            mismatch("an int as text", value)
        try:
            number = int(value)
        except ValueError:
            malformed("an int as text", value)
        if str(number) != value:
            malformed("an int as text", value)
        return key.decoder(number)

    return _key_function(encode), _key_function(decode)


def _key_function(convert: Convert) -> Convert:
    def of_key(value: Any) -> Any:
        try:
            return convert(value)
        except ConversionError as error:
            raise _of_key(error) from None

    return of_key
