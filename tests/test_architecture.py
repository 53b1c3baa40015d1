"""Imports point down, read from the source; the core stands on nothing of ours and does no I/O."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "chasqui"
CORE = PACKAGE / "_core"

#: The floors that docs/architecture.md shows, from the bottom up: the rooms on each, a folder or a
#: single module. The left column of the drawing is 44 characters wide.
FLOORS = [
    re.findall(r"\w+", line[:44])
    for line in (PACKAGE.parent / "docs" / "architecture.md")
    .read_text()
    .partition("\n## ")[0]
    .splitlines()
    if line.startswith("    ")
][::-1]
RANK = {room: rank for rank, rooms in enumerate(FLOORS) for room in rooms}
#: Modules that do I/O.
IO = frozenset(
    f"transport.{name}" for name in ("blocking", "blocking_link", "connection", "embedded", "link")
)
#: Rooms and modules that stand on none of them: they are tested without a server.
NO_IO = (
    "consuming.fate",
    "consuming.shared_slots",
    "converting",
    "events.job_end",
    "events.kinds",
    "events.log",
    "managing.dead_jobs",
    "managing.dlq",
    "managing.entries",
    "managing.results",
    "managing.retention",
    "managing.state",
    "model",
    "producing.chunks",
    "producing.durable",
    "producing.flows",
    "producing.job_options",
    "producing.new_jobs",
    "producing.operations",
    "producing.settings",
    "scripts",
    "timed.cron",
    "timed.fire_calls",
    "timed.fire_plan",
    "timed.repeatables",
    "timed.spec",
    "transport.flow",
    "transport.pipeline",
    "transport.recovery",
    "transport.request",
    "transport.server",
)
#: Only these stand above the public facade, `chasqui/__init__.py`.
ABOVE_FACADE = frozenset(("cli", "spark", "integrations", "testing", "__main__"))

#: All that the core may import besides itself.
CORE_IMPORTS = (
    r"cython|cpython\.\w+|libc\.\w+|posix\.unistd|os|datetime|decimal|chasqui\._core\.\w+"
)
CORE_TYPING = r"typing|typing_extensions|collections\.abc|chasqui\._core\.\w+"
CORE_SOURCES = sorted([*CORE.glob("*.pyx"), *CORE.glob("*.pxd")])


@cache
def graph() -> dict[str, frozenset[str]]:
    """What each module imports of the others, by dotted names without `chasqui.`; the facade is
    `__init__`, and a room's own `__init__` has the name of the room."""
    return {name_of(path): frozenset(ours(path)) - {name_of(path)} for path in sources()}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def room_of(name: str) -> str:
    return name.partition(".")[0]


def ours(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, wherever in it."""
    folder = ("chasqui", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from modules(alias.name, ())
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from modules(module, [alias.name for alias in node.names])


def modules(module: str, names: list[str] | tuple[str, ...]) -> Iterator[str]:
    """The modules behind one import: of what is taken from a folder, each module in it."""
    head, *rest = module.split(".")
    if head != "chasqui":
        return
    place = PACKAGE.joinpath(*rest)
    itself = ".".join(rest) or "__init__"
    if not place.is_dir() or not names:
        yield itself
        return
    for name in names:
        is_ours = (place / name).is_dir() or (place / f"{name}.py").exists()
        yield ".".join([*rest, name]) if is_ours else itself


def reach(name: str) -> frozenset[str]:
    """Everything that a module stands on, directly or through others."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for imported in graph().get(waiting.pop(), frozenset()) - seen:
            seen.add(imported)
            waiting.append(imported)
    return frozenset(seen)


def test_no_module_stands_on_itself():
    """So there is no cycle inside a room either."""
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"imports run in a circle: {' → '.join(error.args[1])}")


def test_every_room_has_its_floor():
    assert sorted(RANK) == sorted({room_of(name) for name in graph()} - {"__init__"})
    assert sum(map(len, FLOORS)) == len(RANK), "a room is on two floors"


@pytest.mark.parametrize("room", sorted(RANK))
def test_imports_point_down(room: str):
    up = {
        f"{name} → {other}"
        for name, imported in graph().items()
        for other in imported
        if room_of(name) == room and RANK.get(room_of(other), -1) > RANK[room]
    }
    assert not up


def test_rooms_of_one_floor_form_no_circle():
    rooms: dict[str, set[str]] = {}
    for name, imported in graph().items():
        rooms.setdefault(room_of(name), set()).update(map(room_of, imported))
    try:
        TopologicalSorter({room: on - {room} for room, on in rooms.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"rooms stand on each other: {' → '.join(error.args[1])}")


@pytest.mark.parametrize("part", NO_IO)
def test_what_is_said_to_do_no_io_does_none(part: str):
    names = [name for name in graph() if name == part or name.startswith(f"{part}.")]
    assert names
    assert not {name: found for name in names if (found := reach(name) & IO)}


@pytest.mark.parametrize("room", sorted(RANK))
def test_nothing_below_imports_the_facade_or_what_stands_on_it(room: str):
    if room not in ABOVE_FACADE:
        imported = {
            room_of(other) for name in graph() if room_of(name) == room for other in graph()[name]
        }
        assert not imported & {"__init__", *ABOVE_FACADE}


def test_conversion_stands_on_errors_and_the_model_only():
    """So that it can be used and tested without a queue."""
    below = {"converting", "errors", "model", "metrics", "_core"}
    for name in graph():
        if room_of(name) == "converting":
            assert {room_of(other) for other in graph()[name]} <= {"converting", "errors", "model"}
            assert {room_of(other) for other in reach(name)} <= below


def test_only_the_doors_run_scripts():
    constant = r"\b(?:adding|flowing|managing|settling|timing)\.[A-Z][A-Z_]+\b"
    for path in sources():
        if room_of(name_of(path)) != "scripts":
            assert not re.search(
                rf"scripts\.loading import .*\bcall\b|{constant}", path.read_text()
            )


def test_the_rules_see_imports_of_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "errors.py").touch()
    for room in ("model", "consuming"):
        (tmp_path / room).mkdir()
    (tmp_path / "model" / "keys.py").touch()
    (tmp_path / "consuming" / "acker.py").touch()
    file = tmp_path / "consuming" / "reader.py"
    forms = {
        "import chasqui.errors": ["errors"],
        "import chasqui.model.keys": ["model.keys"],
        "import chasqui": ["__init__"],
        "from chasqui import errors, Queue": ["errors", "__init__"],
        "from chasqui.model import keys": ["model.keys"],
        "from chasqui.model.keys import Keys": ["model.keys"],
        "from chasqui.model import Keys": ["model"],
        "from ..model.keys import Keys": ["model.keys"],
        "from .. import errors": ["errors"],
        "from . import acker": ["consuming.acker"],
        "def f():\n    from chasqui.model.keys import Keys": ["model.keys"],
        "import json": [],
    }
    for source, expected in forms.items():
        file.write_text(source)
        assert list(ours(file)) == expected, source


@pytest.mark.parametrize("path", CORE_SOURCES, ids=lambda path: path.name)
def test_the_core_imports_itself_and_c(path: Path):
    source = code_of(path)
    for line in re.findall(r"^\s*(?:from|c?import)\b.*", source, re.MULTILINE):
        form = re.fullmatch(r"\s*(?:from (\S+) c?import .+|c?import (\S+)(?: as \w+)?)", line)
        assert form, f"{line!r} is no import that this test can read"
        assert re.fullmatch(CORE_IMPORTS, form[1] or form[2]), line
        assert not line.rstrip().endswith("*"), line


@pytest.mark.parametrize("path", CORE_SOURCES, ids=lambda path: path.name)
def test_the_core_does_no_io_and_has_no_clock_no_log_no_coroutine(path: Path):
    source = code_of(path)
    for word in ("async", "await", "include", "DEF", "environ", "logging", "print", "asyncio"):
        assert not re.search(rf"\b{word}\b", source), word
    for call in (r"socket", r"time", r"open", r"getenv", r"sleep"):
        assert not re.search(rf"(?:\bimport\s+{call}\b|\bfrom\s+{call}\b|\b{call}\s*\()", source), (
            call
        )
    assert "{chasqui" not in source, "key names come from the caller"


@pytest.mark.parametrize("path", sorted(CORE.glob("*.pyx")), ids=lambda path: path.name)
def test_every_module_of_the_core_has_its_pxd_and_its_stub(path: Path):
    assert path.with_suffix(".pxd").exists()
    stub = ast.parse(path.with_suffix(".pyi").read_text())
    for node in ast.walk(stub):
        if isinstance(node, ast.ImportFrom):
            assert re.fullmatch(CORE_TYPING, node.module or ""), ast.unparse(node)
        assert not isinstance(node, ast.Import), ast.unparse(node)


@pytest.mark.parametrize("path", CORE_SOURCES, ids=lambda path: path.name)
def test_every_c_function_says_how_it_fails(path: Path):
    """`except`, `noexcept`, or an object: a C value alone could swallow an exception."""
    objects = r"(?:object|bytes|str|list|dict|tuple|[A-Z]\w*)"  # classes have capitals
    source = re.sub(r"\([^()]*\)", "()", code_of(path))
    for signature in re.findall(r"^\s*cdef (?!class )[\w* ]+\(\)[^\n]*", source, re.MULTILINE):
        sound = rf"except|noexcept|^\s*cdef (?:inline )?{objects} \w+\(\)"
        assert re.search(sound, signature), signature


def code_of(path: Path) -> str:
    """A Cython source without comments, texts and line breaks inside parentheses."""
    source = re.sub(r'"""[\s\S]*?"""', '""', path.read_text())
    source = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', source)
    source = re.sub(r"#.*", "", source)
    return re.sub(r"\([^()]*\)", lambda inside: inside[0].replace("\n", " "), source)
