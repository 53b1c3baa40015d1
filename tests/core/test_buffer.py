"""The command buffer: framing, lending without a copy, nothing half-written."""

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
    assert bytes(buffer) == bytes(buffer.view()) == expected
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


@pytest.mark.parametrize("size", [0, 900, 5000])
def test_while_a_view_is_out_nothing_is_written(size: int):
    buffer = CommandBuffer()
    buffer.command("ECHO", b"x" * size)
    before = bytes(buffer)
    view = buffer.view()
    other = memoryview(buffer)
    part = view[4:]
    assert buffer.is_lent
    for write in (buffer.clear, lambda: buffer.command("PING")):
        with pytest.raises(BufferError, match="view out"):
            write()
    with pytest.raises(BufferError, match="view out"):
        buffer.command(view)
    assert view.readonly
    assert (view == before, part == before[4:], bytes(buffer) == before) == (True, True, True)
    view.release()
    other.release()
    assert buffer.is_lent
    part.release()
    assert not buffer.is_lent
    buffer.clear()
    assert (bytes(buffer), buffer.commands, len(buffer), bool(buffer)) == (b"", 0, 0, False)


def test_a_view_outlives_the_buffer_it_came_from():
    views = []
    for size in (10, 10_000):
        buffer = CommandBuffer()
        buffer.command("ECHO", b"x" * size)
        views.append((buffer.view(), frame("ECHO", b"x" * size)))
        del buffer
    assert all(view == expected for view, expected in views)


def test_nobody_gets_to_write_through_a_view():
    buffer = CommandBuffer()
    buffer.command("PING")
    with pytest.raises(TypeError):
        buffer.view()[0] = 0
    with pytest.raises((BufferError, TypeError)):
        __import__("io").BytesIO(b"abcdefgh").readinto(buffer)
    assert not buffer.is_lent


def test_memory_is_kept_for_the_next_run():
    buffer = CommandBuffer()
    assert buffer.capacity >= 1000
    buffer.command("ECHO", b"x" * 100_000)
    capacity = buffer.capacity
    for _ in range(100):
        buffer.clear()
        buffer.command("ECHO", b"x" * 100_000)
    assert buffer.capacity == capacity


class Transport(RuleBasedStateMachine):
    """Writes, views kept and dropped in any order: what was lent never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = CommandBuffer()
        self.written = b""
        self.views: list[tuple[memoryview, bytes]] = []

    @rule(arguments=st.lists(st.binary(max_size=700), min_size=1, max_size=3))
    def write(self, arguments: list[bytes]) -> None:
        try:
            self.buffer.command(*arguments)
        except BufferError:
            assert self.views
        else:
            assert not self.views
            self.written += frame(*arguments)

    @rule()
    def lend(self) -> None:
        self.views.append((self.buffer.view(), self.written))

    @rule(at=st.integers(0, 5))
    def release(self, at: int) -> None:
        if self.views:
            self.views.pop(at % len(self.views))[0].release()

    @rule()
    def clear(self) -> None:
        if self.views:
            with pytest.raises(BufferError):
                self.buffer.clear()
        else:
            self.buffer.clear()
            self.written = b""

    @invariant()
    def lent_bytes_are_good(self) -> None:
        assert all(view == expected for view, expected in self.views)
        assert bytes(self.buffer) == self.written
        assert self.buffer.is_lent == bool(self.views)


TestTransport = Transport.TestCase
