"""The command buffer: framing, nothing half-written, memory that is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chasqui._core.buffer import CommandBuffer
from tests.core.record_replies import frame

ARGUMENTS = st.one_of(
    st.binary(max_size=2000),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    st.integers(),
    st.floats(allow_nan=True),
)


def plain(argument: object) -> bytes:
    """An argument in the form that a command carries."""
    return argument if isinstance(argument, bytes) else str(argument).encode()


@given(st.lists(st.lists(ARGUMENTS, min_size=1, max_size=12), max_size=8))
def test_commands_are_framed_one_after_the_other(commands):
    buffer = CommandBuffer()
    for arguments in commands:
        buffer.command(*arguments)
    expected = b"".join(frame(*map(plain, arguments)) for arguments in commands)
    assert bytes(buffer) == expected
    assert (len(buffer), buffer.commands, bool(buffer)) == (
        len(expected),
        len(commands),
        bool(commands),
    )


@given(st.lists(ARGUMENTS, min_size=1, max_size=12))
def test_framing_is_that_of_hiredis_py(arguments):
    hiredis = pytest.importorskip("hiredis")
    buffer = CommandBuffer()
    buffer.command(*arguments)
    assert bytes(buffer) == hiredis.pack_command(tuple(arguments))


class Loud(int):
    """Its own repr must not reach the wire."""

    def __repr__(self) -> str:
        return "\r\nFLUSHALL\r\n"

    __str__ = __repr__


class Bytes(bytes):
    pass


@pytest.mark.parametrize(
    ("argument", "form"),
    [
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"abc")[1:], b"bc"),
        (memoryview(b""), b""),
        (Bytes(b"x"), b"x"),
        (Loud(7), b"7"),
        (2**100, str(2**100).encode()),
        (0.1, b"0.1"),
        (float("inf"), b"inf"),
        ("ünï", "ünï".encode()),
    ],
)
def test_arguments_of_other_types(argument: object, form: bytes):
    buffer = CommandBuffer()
    buffer.command(argument)
    assert bytes(buffer) == frame(form)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), ValueError),
        (("SET", True), TypeError),
        (("SET", None), TypeError),
        (("SET", [b"x"]), TypeError),
        (("SET", "\ud800"), UnicodeEncodeError),
        (("SET", memoryview(b"abcd")[::2]), BufferError),
        (("SET", b"x" * 5000, object()), TypeError),
    ],
)
def test_a_command_that_fails_leaves_nothing_behind(arguments, error):
    buffer = CommandBuffer()
    buffer.command("PING")
    with pytest.raises(error):
        buffer.command(*arguments)
    assert (bytes(buffer), buffer.commands) == (frame("PING"), 1)
    buffer.command("ECHO", "x")
    assert bytes(buffer) == frame("PING") + frame("ECHO", "x")


def test_a_cleared_buffer_is_empty():
    buffer = CommandBuffer()
    buffer.command("ECHO", b"x" * 5000)
    buffer.clear()
    assert (bytes(buffer), buffer.commands, len(buffer), bool(buffer)) == (b"", 0, 0, False)


def test_memory_is_kept_for_the_next_run():
    buffer = CommandBuffer()
    assert buffer.capacity >= 1000
    buffer.command("ECHO", b"x" * 100_000)
    capacity = buffer.capacity
    for _ in range(100):
        buffer.clear()
        buffer.command("ECHO", b"x" * 100_000)
    assert buffer.capacity == capacity


class Writing(RuleBasedStateMachine):
    """Commands written, refused and cleared in any order: the buffer holds what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = CommandBuffer()
        self.written = b""

    @rule(arguments=st.lists(st.binary(max_size=700), min_size=1, max_size=3))
    def write(self, arguments: list[bytes]) -> None:
        self.buffer.command(*arguments)
        self.written += frame(*arguments)

    @rule(arguments=st.lists(st.binary(max_size=700), max_size=3))
    def fail(self, arguments: list[bytes]) -> None:
        with pytest.raises(TypeError):
            self.buffer.command(*arguments, None)  # type: ignore[arg-type]

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.written = b""

    @invariant()
    def holds_what_was_written(self) -> None:
        assert bytes(self.buffer) == self.written


TestWriting = Writing.TestCase
