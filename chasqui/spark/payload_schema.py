"""The DDL of payloadSchema, checked before Spark parses it.

Spark sees it inside the schema of a whole table, so Spark's error names columns and positions that
the user has not written. This finds the common mistakes; Spark finds the rest.
"""

import re
from typing import Final

from chasqui.model.words import meant, near

#: The types that Spark's parser knows. payload_types.py refuses those that a payload cannot hold.
_TYPES: Final = (
    "boolean", "tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long",
    "float", "real", "double", "decimal", "dec", "numeric", "string", "char", "character",
    "varchar", "binary", "date", "time", "timestamp", "timestamp_ntz", "timestamp_ltz",
    "interval", "void", "variant", "geography", "geometry", "array", "map", "struct",
)  # fmt: skip
_TOKEN: Final = re.compile(
    r"""\s*(`(?:[^`]|``)+`|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s`'"<>(),:]+|[<>(),:])"""
)
_MARKS: Final = frozenset("<>(),:")


def schema_text(value: str) -> str:
    """Names with their types, `order_id bigint, items array<struct<price: decimal(10,2)>>`."""
    if not value.strip():
        raise ValueError("must not be empty")
    try:
        _Reader(value).check()
    except ValueError as error:
        raise ValueError(f"in {value!r} {error}") from None
    return value


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"a quote is not closed: {text[at:].strip()}")
            self._tokens.append(found[1])
            at = found.end()
        self._at = 0

    def check(self) -> None:
        self._fields("")
        if self._next_is(">"):
            raise ValueError("there is a '>' too many")
        if self._at < len(self._tokens):
            raise ValueError(f"{self._tokens[self._at]!r} is not expected")

    def _next_is(self, *tokens: str) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at] in tokens

    def _take(self, what: str) -> str:
        """The next token, which must be a word."""
        if self._at == len(self._tokens) or self._tokens[self._at] in _MARKS:
            raise ValueError(what)
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, mark: str, path: str) -> None:
        if not self._next_is(mark):
            raise ValueError(f"column {path} lacks a {mark!r}")
        self._at += 1

    def _fields(self, inside: str) -> None:
        while self._at < len(self._tokens) and not self._next_is(">"):
            name = self._take(f"a name is missing before {self._tokens[self._at]!r}").strip("`")
            if self._next_is(":"):
                self._at += 1
            self._type(f"{inside}{name}")
            if not self._next_is(","):
                return
            self._at += 1
            if self._at == len(self._tokens) or self._next_is(">"):
                raise ValueError("a name is missing after the last ','")

    def _type(self, path: str) -> None:
        kind = self._take(f"column {path} has no type").lower()
        if kind not in _TYPES:
            raise ValueError(f"column {path}: there is no type {kind}{meant(near(kind, _TYPES))}")
        if kind in ("array", "map", "struct"):
            self._expect("<", path)
            if kind == "struct":
                self._fields(f"{path}.")
            else:
                self._type(f"{path}.element" if kind == "array" else f"{path}.key")
            if kind == "map":
                self._expect(",", path)
                self._type(f"{path}.value")
            self._expect(">", path)
        # Numbers of a decimal, NOT NULL, COMMENT, COLLATE and the like are left to Spark.
        depth = 0
        while self._at < len(self._tokens) and (depth or not self._next_is(",", ">")):
            depth += self._next_is("(") - self._next_is(")")
            self._at += 1
