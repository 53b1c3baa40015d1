"""`sync.Queue` is `Queue` without `await`: generated from it, with the same face."""

import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest

from chasqui import sync
from chasqui.queue import Queue
from tools.make_sync import ROOT, TWINS, Twin, Untranslatable, made, translated


def face(kind: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


def test_the_same_names():
    assert face(Queue).keys() == face(sync.Queue).keys()


@pytest.mark.parametrize("name", ["__init__", *face(Queue)])
def test_the_same_parameters(name: str):
    ours, theirs = getattr(Queue, name), getattr(sync.Queue, name)
    if isinstance(ours, property):
        assert isinstance(theirs, property)
        return
    one, other = inspect.signature(ours), inspect.signature(theirs)
    # Names, kinds and defaults; a sync queue takes more as a credential provider.
    assert [p.replace(annotation=None) for p in one.parameters.values()] == [
        p.replace(annotation=None) for p in other.parameters.values()
    ]


@pytest.mark.parametrize("name", face(Queue))
def test_the_same_first_words(name: str):
    """Where both explain themselves, they say the same."""
    assert getattr(Queue, name).__doc__ == getattr(sync.Queue, name).__doc__


# ── The tool that generates it ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: Path(twin.target).stem)
def test_the_generated_file_is_current(twin: Twin):
    assert (ROOT / twin.target).read_text() == made(twin), "run `make sync`"


def blocking(source: str, **options: Any) -> str:
    twin = Twin("in.py", "out.py", **options)
    return translated(textwrap.dedent(source), twin)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("async def f(): await g()", "def f(): g()"),
        ("async def f(): return (await g())[0]", "def f(): return g()[0]"),
        ("async def f(): return (await g(x)).name", "def f(): return g(x).name"),
        ("async def f(): return h((await g(x)).name)", "def f(): return h(g(x).name)"),
        ("async def f(): return h(await g(x))", "def f(): return h(g(x))"),
        ("async def f(): await (a if b else asyncio.sleep)(1)",
         "def f(): (a if b else time.sleep)(1)"),
        ("async def f():\n    async with g() as x:\n        async for y in x: pass",
         "def f():\n    with g() as x:\n        for y in x: pass"),
        ("async def __aenter__(self): ...", "def __enter__(self): ..."),
        ("def f() -> Awaitable[list[Connection]]: ...", "def f() -> list[BlockingConnection]: ..."),
        ("import asyncio", "import time"),
        ("from chasqui.transport.connection import (\n    Connection as C,\n    Other,\n)",
         "from chasqui.transport.blocking import BlockingConnection as C\n"
         "from chasqui.transport.connection import Other"),
        ("x = 'await'  # await, async, Connection", "x = 'await'  # await, async, Connection"),
        ("s = 'ä'; t = Connection()  # ─", "s = 'ä'; t = BlockingConnection()  # ─"),
    ],
)  # fmt: skip
def test_code_is_translated(source: str, expected: str):
    assert blocking(source) == expected


def test_marked_statements_are_left_out():
    source = """
    first = 1
    #: About the second,
    #: in two lines.
    second = Thing(  # async only
        await 2,
    )
    if third:  # async only
        fourth()
    else:
        fifth()
    sixth = 6
    """
    assert blocking(source) == "\nfirst = 1\nsixth = 6\n"


def test_docstrings_and_additions_of_a_twin_go_where_they_belong():
    source = '"""Old."""\n\nimport a\n\n\nclass C:\n    """Old, too."""\n'
    twin = {"docstrings": {"": "New.\n\nYes.\n", "C": "Newer.\n\nTwo.\n"}, "added": "x = 1"}
    assert blocking(source, **twin) == (
        '"""New.\n\nYes.\n"""\n\nimport a\nx = 1\n\n\n'
        'class C:\n    """Newer.\n\n    Two.\n    """\n'
    )


@pytest.mark.parametrize(
    "source",
    [
        "asyncio.Event()",
        "async def f(): return [x async for x in y]",
        "f(\n    1,  # async only\n)",
    ],
)
def test_what_has_no_translation_is_refused(source: str):
    with pytest.raises(Untranslatable):
        blocking(source)
