"""A compiled annotation, and the words of the errors of all of them.

The functions inside a `Converter` take a value and no path: a path is put together only while an
error travels up, each level adding its step. So a value that is right pays nothing for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from chasqui.errors import ConversionError
from chasqui.model.payload import MAX_DEPTH

#: The types that a decoded payload is made of.
KINDS: Final[frozenset[type]] = frozenset((type(None), bool, int, float, str, bytes, list, dict))

Convert = Callable[[Any], Any]


class Unsupported(Exception):
    """Why an annotation has no converter; `converter_for` makes a TypeError of it."""

    def __init__(self, annotation: object, why: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(annotation, why, fields)
        self.annotation = annotation
        self.why = why
        #: The fields that lead to it, from the outside in: "Order.lines".
        self.fields = fields


@dataclass(slots=True, eq=False)
class Converter:
    """What encodes and decodes the values of one annotation.

    `encoder` and `decoder` raise a ConversionError whose path begins inside the value; `encode` and
    `decode` put it under `path`.
    """

    #: What a value must be, for errors: "a Decimal".
    expected: str
    #: The types that an encoded value may have, of `KINDS`.
    kinds: frozenset[type]
    #: The types that `encode` takes; a union chooses by them.
    accepts: tuple[type, ...]
    encoder: Convert
    decoder: Convert
    #: Both directions only check, and return the object that they got.
    is_native: bool = False
    #: None's type, bool, int, float, str or bytes, if that is the whole annotation.
    scalar: type | None = None

    def encode(self, value: object, path: str) -> Any:
        """The value as `chasqui.model.payload` takes it; ConversionError if it is of another type.

        A native value comes back as it is: a `str` of a subclass, such as a StrEnum, is written as
        plain `str` by the payload.
        """
        try:
            return self.encoder(value)
        except ConversionError as error:
            error.within(path)
            raise
        except RecursionError:
            text = f"nested up to {MAX_DEPTH} levels and not inside itself"
            raise ConversionError(path, text, "more") from None

    def decode(self, value: object, path: str) -> Any:
        """The typed value of what `encode` returned; ConversionError if it is no such thing."""
        try:
            return self.decoder(value)
        except ConversionError as error:
            error.within(path)
            raise


def mismatched(expected: str, value: object) -> ConversionError:
    """The error for a value of the wrong type."""
    return ConversionError("", expected, kind_name(value))


def mismatch(expected: str, value: object) -> NoReturn:
    """Raises the error for a value of the wrong type."""
    raise mismatched(expected, value) from None


def malformed(expected: str, value: object) -> NoReturn:
    """Raises the error for a value of the right type that says nothing of the kind."""
    raise ConversionError("", expected, f"{article(kind_name(value))} that is none") from None


def failed(expected: str, error: Exception) -> ConversionError:
    """The error for a value at which code of the user or of a library raised `error`."""
    return ConversionError("", expected, f"{article(type(error).__name__)} from it")


def kind_name(value: object) -> str:
    return "None" if value is None else type(value).__name__


def article(name: str) -> str:
    """The name with its article: "an int", "a UUID"."""
    vowel = name[:1] in tuple("aeioAEIO") or (name[:1] in tuple("uU") and name[1:2].islower())
    return f"{'an' if vowel else 'a'} {name}"


def either(texts: list[str]) -> str:
    """The texts as a choice: "an int, a str or None"."""
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def key_step(key: object) -> str:
    """The step into a key of a dict, `['total']`, cut if it is long."""
    text = repr(key)
    return f"[{text if len(text) <= 60 else text[:57] + '...'}]"


def annotation_text(annotation: object) -> str:
    """An annotation as the user wrote it, or nearly."""
    if isinstance(annotation, type) and not hasattr(annotation, "__origin__"):
        return annotation.__qualname__
    return repr(annotation).replace("typing.", "").replace("collections.abc.", "")
