"""From an annotation to its converter: unwraps it, finds what it is, and ends at classes that name
themselves."""

import enum
import typing
from collections import abc
from collections.abc import Iterator
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Final, Literal, NoReturn, Union, get_args, get_origin

from chasqui.converting import containers, models, records, scalars
from chasqui.converting.converter import Converter, Unsupported, annotation_text, article
from chasqui.converting.failed import FAILED, or_failed
from chasqui.converting.unions import union_converter
from chasqui.model.steps import Failed

#: Said with every refusal that has no better advice.
SUPPORTED: Final = (
    "supported are str, int, float, bool, None, bytes, Any, datetime, date, time, timedelta, UUID, "
    "Decimal, enums, Literal, list, tuple, set, dict and their abstract forms, Optional, unions, "
    "dataclasses, TypedDicts, NamedTuples, attrs classes, pydantic models and msgspec Structs"
)

#: Abstract containers that come back as a list.
_ITERABLES: Final = (
    abc.Sequence,
    abc.MutableSequence,
    abc.Collection,
    abc.Iterable,
    abc.Reversible,
)
_SETS: Final[dict[type, type]] = {set: set, frozenset: frozenset, abc.Set: set, abc.MutableSet: set}
_MAPPINGS: Final = (dict, abc.Mapping, abc.MutableMapping)

#: Forms that say something other than a type, and what to do about each.
_REFUSED: Final = {
    "Final": "marks a constant; write the type alone",
    "ClassVar": "marks a field of the class; write the type alone",
    "InitVar": "is not kept by its class; write the type alone",
    "Required": "belongs into a TypedDict; write the type alone",
    "NotRequired": "belongs into a TypedDict; write the type alone, or Optional with a default",
    "Callable": "cannot be sent; send a name, and look the function up where it runs",
    "Never": "has no values",
    "NoReturn": "has no values; a task that returns nothing returns None",
    "Self": "has no meaning here; name the class",
    "Iterator": "is used up by its first reader; annotate Iterable or list",
    "Generator": "is used up by its first reader; annotate Iterable or list",
    "type": "cannot be sent; send a name, and look the class up where it runs",
    "TypeVar": "is a type variable; write the type itself, as in Box[int]",
    "ForwardRef": "is a name that is not resolved; define it before the task",
    "str": "is a name that is not resolved; define it before the task",
}

_NAMES_ITSELF: Final = "names itself outside of a list or dict; name a type"
#: Where the refused forms are from.
_MODULES: Final = ("builtins", "collections.abc", "dataclasses", "typing", "typing_extensions")


def converter_for(annotation: Any, place: str) -> Converter:
    """The converter of an annotation whose names are resolved, as `typing.get_type_hints` does it.

    Raises TypeError if it is not supported, with `place` ("parameter 'order' of task 'ship'"), the
    part of the annotation that is not, and what to do.
    """
    try:
        if _is_hashable(annotation):
            return _compiled(annotation)
        return _Compiler().compile(annotation)
    except Unsupported as error:
        inside = "".join(f"{field}: " for field in error.fields)
        text = f"{place}: {inside}{annotation_text(error.annotation)} {error.why}"
        raise TypeError(text) from None


@lru_cache(maxsize=1024)
def _compiled(annotation: Any) -> Converter:
    return _Compiler().compile(annotation)


class _Compiler:
    """Compiles one annotation; it remembers what it is compiling, which may name itself."""

    def __init__(self) -> None:
        self._records: dict[Any, Converter] = {}
        self._open_aliases: dict[Any, Converter] = {}
        self._recursive_aliases: set[Any] = set()

    def compile(self, annotation: Any) -> Converter:
        annotation = _unwrapped(annotation)
        if _is_hashable(annotation) and annotation in scalars.SCALARS:
            return scalars.SCALARS[annotation]
        if annotation is Failed:
            return FAILED
        origin = get_origin(annotation)
        if _is_alias(annotation) or _is_alias(origin):
            return self._alias(annotation)
        if origin is Literal:
            return scalars.literal_converter(annotation)
        if origin in (Union, UnionType):
            return self._union(annotation)
        kind = annotation if origin is None else origin
        if not isinstance(kind, type):
            _refuse(annotation)
        made = self._container(annotation, kind) or self._record(annotation, kind)
        return made or _refuse(annotation)

    def _union(self, annotation: Any) -> Converter:
        literals: list[Any] = []
        members: list[Converter] = []
        seen: list[Any] = []  # no set: an Annotated inside may have no hash
        for argument in self._members(annotation, ()):
            if argument in seen:
                continue
            seen.append(argument)
            if get_origin(argument) is Literal:
                literals.append(argument)
            else:
                members.append(self.compile(argument))
        if any(member in self._open_aliases.values() for member in members):
            raise Unsupported(annotation, _NAMES_ITSELF)
        scalar_kinds = {member.scalar for member in members}
        # `Literal["a"] | str` is a str: the literal is there for people and editors.
        values = scalars.literal_values(literals)
        left = tuple(value for value in values if type(value) not in scalar_kinds)
        if left:
            members.append(scalars.literal_converter(Literal[left]))
        results = [member for member in members if member is not FAILED]
        made = results[0] if len(results) == 1 else union_converter(annotation, results)
        return made if len(results) == len(members) else or_failed(made)

    def _members(self, annotation: Any, within: tuple[Any, ...]) -> Iterator[Any]:
        """The members of a union, those of the aliases in it too: two of them may have None."""
        for argument in map(_unwrapped, get_args(annotation)):
            is_alias = _is_alias(argument) or _is_alias(get_origin(argument))
            if is_alias and argument not in self._open_aliases and argument not in within:
                value = _unwrapped(_alias_value(argument))
                if get_origin(value) in (Union, UnionType):
                    yield from self._members(value, (*within, argument))
                    continue
            if argument in within:
                raise Unsupported(annotation, _NAMES_ITSELF)
            yield argument

    def _alias(self, annotation: Any) -> Converter:
        """What a `type` statement stands for; it may name itself, as that of JSON does."""
        if annotation in self._open_aliases:
            self._recursive_aliases.add(annotation)
            return self._open_aliases[annotation]
        value = _alias_value(annotation)
        records_before = dict(self._records)
        opened = self._opened(annotation_text(annotation), frozenset(), ())
        opened.is_native = True
        self._open_aliases[annotation] = opened
        made = self.compile(value)
        if annotation in self._recursive_aliases and not made.is_native:
            # It was a guess, and containers were compiled by it.
            self._records = records_before
            opened.is_native = False
            made = self.compile(value)
        opened.encoder, opened.decoder = made.encoder, made.decoder
        del self._open_aliases[annotation]
        return made

    def _opened(self, name: str, kinds: frozenset[type], accepts: tuple[type, ...]) -> Converter:
        """A converter that others can be compiled with before it has its own functions."""

        def encode(value: Any) -> Any:
            return opened.encoder(value)

        def decode(value: Any) -> Any:
            return opened.decoder(value)

        opened = Converter(article(name), kinds, accepts, encode, decode)
        return opened

    def _container(self, annotation: Any, kind: type) -> Converter | None:
        arguments = get_args(annotation)
        if kind is tuple:
            return self._tuple(annotation, arguments)
        first, second = (*arguments, Any, Any)[:2]
        if kind is list:
            return containers.list_converter(self.compile(first))
        if kind in _ITERABLES:
            return containers.iterable_converter(kind, self.compile(first))
        if kind in _SETS:
            return containers.set_converter(kind, _SETS[kind], self.compile(first))
        if kind in _MAPPINGS:
            key, value = self.compile(first), self.compile(second)
            return containers.dict_converter(annotation, kind, key, value)
        return None

    def _tuple(self, annotation: Any, arguments: tuple[Any, ...]) -> Converter:
        if annotation in (tuple, typing.Tuple):  # noqa: UP006, people write it
            return containers.tuple_converter(scalars.ANY)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return containers.tuple_converter(self.compile(arguments[0]))
        for argument in arguments:
            if getattr(argument, "__unpacked__", False) or get_origin(argument) is typing.Unpack:
                raise Unsupported(annotation, "is unpacked inside; annotate tuple[X, ...] or list")
        return containers.row_converter([self.compile(argument) for argument in arguments])

    def _record(self, annotation: Any, kind: Any) -> Converter | None:
        """A class with fields, an enum or a model; None for any other class."""
        key = annotation if _is_hashable(annotation) else repr(annotation)
        if key in self._records:
            return self._records[key]
        if issubclass(kind, enum.Enum):
            return scalars.enum_converter(kind)
        if models.is_pydantic(kind):
            return models.pydantic_converter(kind, annotation)
        if models.is_struct(kind):
            return models.struct_converter(kind, annotation)
        is_row = records.is_named_tuple(kind)
        is_map = records.is_typed_dict(kind)
        if not (is_row or is_map or hasattr(kind, "__attrs_attrs__") or _is_dataclass(kind)):
            return None
        opened = self._opened(
            kind.__name__, frozenset((list if is_row else dict,)), (dict if is_map else kind,)
        )
        self._records[key] = opened
        arguments = get_args(annotation)
        if is_map:
            encoder, decoder, opened.is_native = records.typed_dict_functions(
                kind, arguments, self.compile
            )
        elif is_row:
            encoder, decoder = records.named_tuple_functions(kind, arguments, self.compile)
        else:
            fields_of = records.dataclass_fields if _is_dataclass(kind) else records.attrs_fields
            fields = fields_of(kind, arguments, self.compile)
            encoder = records.record_encoder(kind, fields)
            decoder = records.record_decoder(kind, fields)
        opened.encoder, opened.decoder = encoder, decoder
        return opened


def _unwrapped(annotation: Any) -> Any:
    """The type inside Annotated and NewType."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif annotation is typing.LiteralString:
            return str
        else:
            return annotation


def _is_alias(annotation: Any) -> bool:
    """A `type` statement of Python 3.12, or its form in typing_extensions."""
    return type(annotation).__name__ == "TypeAliasType"


def _alias_value(annotation: Any) -> Any:
    alias = get_origin(annotation) or annotation
    bound = dict(zip(alias.__type_params__, get_args(annotation), strict=False))
    return records.substituted(records.alias_value(alias), bound)


def _is_dataclass(kind: type) -> bool:
    return hasattr(kind, "__dataclass_fields__")


def _is_hashable(annotation: Any) -> bool:
    """Not with a list among the metadata of an Annotated."""
    try:
        hash(annotation)
    except TypeError:
        return False
    return True


def _refuse(annotation: Any) -> NoReturn:
    form = get_origin(annotation) or annotation
    names = [] if isinstance(form, type) else [type(form).__name__]
    if getattr(form, "__module__", None) in _MODULES:  # a user's class may have such a name too
        names += [getattr(form, "_name", ""), getattr(form, "__name__", "")]
    for name in names:
        if name in _REFUSED:
            raise Unsupported(annotation, _REFUSED[name])
    what = "is a class without a form on the wire" if isinstance(form, type) else "is not supported"
    raise Unsupported(annotation, f"{what}; {SUPPORTED}")
