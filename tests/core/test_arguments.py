"""Arguments as maps: what Python's own signatures accept, with plain values, is taken."""

import inspect
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chasqui._core.arguments import Arguments, BoundCall
from chasqui._core.payload import pack_calls
from tests.core.memory import assert_keeps_nothing

NAMES = ["a", "b", "c", "day", "ünïcode", "class_"]
TYPES = [None, int, str, bytes, float, bool, type(None)]
VALUES = st.one_of(
    st.integers(), st.text(max_size=3), st.booleans(), st.none(), st.floats(), st.binary(max_size=2)
)


class Text(str):
    """A str of another type."""


@st.composite
def functions(draw: st.DrawFn) -> tuple[inspect.Signature, Arguments, list[type | None]]:
    """A signature, and the same as Arguments."""
    count = draw(st.integers(0, len(NAMES)))
    positional = draw(st.integers(0, count))
    first_default = draw(st.integers(0, positional))
    types = [draw(st.sampled_from(TYPES)) for _ in range(count)]
    parameters = []
    for i in range(count):
        is_keyword = i >= positional
        has_default = draw(st.booleans()) if is_keyword else i >= first_default
        kinds = inspect.Parameter
        parameters.append(
            inspect.Parameter(
                NAMES[i],
                kinds.KEYWORD_ONLY if is_keyword else kinds.POSITIONAL_OR_KEYWORD,
                default=None if has_default else kinds.empty,
            )
        )
    required = tuple(one.default is one.empty for one in parameters)
    names = tuple(one.name for one in parameters)
    return (
        inspect.Signature(parameters),
        Arguments(names, tuple(types), required, positional),
        types,
    )


def are_plain(data: dict[str, Any], types: list[type | None]) -> bool:
    by_name = dict(zip(NAMES, types, strict=False))
    return all(by_name[name] in (None, type(value)) for name, value in data.items())


@given(
    functions(),
    st.lists(VALUES, max_size=7).map(tuple),
    st.dictionaries(st.sampled_from([*NAMES, "other"]), VALUES),
)
def test_it_takes_what_the_signature_takes(
    function: tuple[inspect.Signature, Arguments, list[type | None]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    signature, arguments, types = function
    found = arguments.bind(args, kwargs)
    try:
        judge = signature.bind(*args, **kwargs).arguments
    except TypeError:
        assert found is None
        return
    if not are_plain(judge, types):
        assert found is None
        return
    assert found is not None
    assert list(found) == list(judge), "in the order of the parameters"
    assert all(found[name] is judge[name] for name in judge)


@given(functions(), st.dictionaries(st.sampled_from([*NAMES, "other", b"a"]), VALUES))
def test_data_fit_if_the_function_can_be_called_with_them(
    function: tuple[inspect.Signature, Arguments, list[type | None]], data: dict[Any, Any]
) -> None:
    signature, arguments, types = function
    before = dict(data)
    found = arguments.fit(data)
    try:
        judge = signature.bind(**data).arguments
    except TypeError:
        assert not found
    else:
        assert found is are_plain(judge, types)
    assert data == before


@pytest.mark.parametrize("data", [None, 5, "a", [], [("a", 1)], b"", type("D", (dict,), {})(a=1)])
def test_only_maps_fit(data: object) -> None:
    assert Arguments(("a",), (None,), (False,), 1).fit(data) is False


def test_values_of_subclasses_are_not_plain() -> None:
    arguments = Arguments(("a",), (str,), (True,), 1)
    assert arguments.bind(("x",), {}) == {"a": "x"}
    assert arguments.bind((Text("x"),), {}) is None
    assert arguments.bind((), {Text("a"): "x"}) == {"a": "x"}
    assert type(next(iter(arguments.bind((), {Text("a"): "x"}) or {}))) is str
    assert not arguments.fit({"a": Text("x")})


def test_an_error_of_a_key_comes_out() -> None:
    class Rude(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            raise LookupError("of the key")

    with pytest.raises(LookupError, match="of the key"):
        Arguments(("a",), (None,), (True,), 1).bind((), {Rude("a"): 1})
    with pytest.raises(LookupError, match="of the key"):
        Arguments(("a",), (None,), (True,), 1).fit({Rude("a"): 1})


@pytest.mark.parametrize(
    "wrong",
    [
        (("a",), (), (True,), 1),
        (("a",), (None,), (), 1),
        (("a",), (None,), (True,), 2),
        (("a",), (None,), (True,), -1),
    ],
)
def test_what_does_not_agree_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="equally long"):
        Arguments(*wrong)


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError):
        Arguments(["a"], (None,), (True,), 1)  # type: ignore[arg-type]
    arguments = Arguments(("a",), (None,), (True,), 1)
    for args, kwargs in (([1], {}), ((1,), None), (None, {})):
        with pytest.raises(TypeError):
            arguments.bind(args, kwargs)  # type: ignore[arg-type]


# ── Calls ───────────────────────────────────────────────────────────────────────────────────────


class Call(BoundCall):
    __slots__ = ()


def packed(calls: list[Any], task: object = "t", kind: type = Call) -> tuple[int, list[Any], Any]:
    payloads: list[bytes] = []
    data: list[Any] = []
    return pack_calls(calls, kind, task, 1 << 20, payloads, data), payloads, data


def test_calls_of_one_task_are_packed_up_to_the_first_other_one() -> None:
    task = "t"
    calls: list[Any] = [Call(task, {"n": n}) for n in range(3)]
    assert packed(calls, task) == (
        3,
        [b"\x81\xa1n\x00", b"\x81\xa1n\x01", b"\x81\xa1n\x02"],
        [{"n": 0}, {"n": 1}, {"n": 2}],
    )
    others = [Call("other", 1), BoundCall(task, 1), None, 5, Call(task, object()), Call(task, {1})]
    for other in others:
        count, payloads, data = packed([*calls[:2], other, calls[2]], task)
        assert (count, len(payloads), len(data)) == (2, 2, 2)
    assert packed([], task) == (0, [], [])
    with pytest.raises(TypeError, match="int must be a BoundCall"):
        packed([], task, int)
    payloads = []
    assert pack_calls([Call(task, "x" * 100)], Call, task, 50, payloads, []) == 0


def test_a_call_is_what_it_was_made_of() -> None:
    call = BoundCall("t", {"n": 1})
    assert (call.task, call.data) == ("t", {"n": 1})
    with pytest.raises(AttributeError):
        call.data = 5
    with pytest.raises(TypeError):
        BoundCall()  # type: ignore[call-arg]


LONG = "x" * 40
PLAIN = Arguments(("a", "b"), (str, None), (True, False), 2)
CALLS: dict[str, Any] = {
    "bind": lambda: PLAIN.bind((LONG + "y",), {"b": [LONG]}),
    "bind, wrong": lambda: (PLAIN.bind((5,), {}), PLAIN.bind((), {}), PLAIN.bind((), {"c": LONG})),
    "bind, too many": lambda: PLAIN.bind((LONG, 1, 2), {}),
    "fit": lambda: (PLAIN.fit({"a": LONG + "y", "b": []}), PLAIN.fit({"c": 1}), PLAIN.fit(None)),
    "Arguments": lambda: Arguments(("a" * 50,), (str,), (True,), 1),
    "call": lambda: Call([LONG], {"n": LONG + "y"}),
    "pack_calls": lambda: packed([Call("t", {"n": LONG + "y"}), Call("t", {1})]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_many_calls_keep_nothing(name: str) -> None:
    assert_keeps_nothing(CALLS[name], 20_000)


def test_references_are_given_back() -> None:
    value, other = Text("a value"), [LONG]
    before = sys.getrefcount(value), sys.getrefcount(other)
    arguments = Arguments(("a", "b"), (None, None), (True, False), 2)
    for _ in range(100):
        arguments.bind((value,), {"b": other})
        arguments.bind((value, other, 1), {})
        arguments.fit({"a": value, "b": other})
        packed([Call("t", [value, other]), Call(value, other)])
    assert (sys.getrefcount(value), sys.getrefcount(other)) == before
