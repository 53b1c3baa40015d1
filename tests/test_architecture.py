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

#: The layers that docs/architecture.md shows, from the bottom up: their names, and what is said of
#: them.
LAYERS = [
    (re.findall(r"\w+", names.removesuffix("+ lua/")), what)
    for names, what in re.findall(
        r"^    (\S.*?)  +(\S.*)$",
        (PACKAGE.parent / "docs" / "architecture.md").read_text().partition("\n## ")[0],
        re.MULTILINE,
    )
][::-1]
RANK = {name: rank for rank, (names, _) in enumerate(LAYERS) for name in names}
#: What does I/O.
IO = frozenset(("connection", "blocking", "embedded", "topology"))
#: Only these stand above the public facade, `chasqui/__init__.py`.
ABOVE_FACADE = ("cli", "spark", "integrations", "__main__")

#: All that the core may import besides itself.
CORE_IMPORTS = (
    r"cython|cpython\.\w+|libc\.\w+|posix\.unistd|os|datetime|decimal|chasqui\._core\.\w+"
)
CORE_TYPING = r"typing|typing_extensions|collections\.abc|chasqui\._core\.\w+"
CORE_SOURCES = sorted([*CORE.glob("*.pyx"), *CORE.glob("*.pxd")])


@cache
def graph() -> dict[str, frozenset[str]]:
    """What each top-level name of the package imports of the others; the facade is `__init__`."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).with_suffix("").parts[0]
        found.setdefault(name, set()).update(ours(path))
    return {name: frozenset(imported - {name}) for name, imported in found.items()}


def ours(path: Path) -> Iterator[str]:
    """The top-level names of the package that a file imports, wherever in it."""
    folder = ("chasqui", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from top_level(alias.name, ())
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from top_level(module, [alias.name for alias in node.names])


def top_level(module: str, names: list[str] | tuple[str, ...]) -> Iterator[str]:
    head, *rest = module.split(".")
    if head != "chasqui":
        return
    if rest:
        yield rest[0]
        return
    for name in names or ("__init__",):
        is_ours = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
        yield name if is_ours else "__init__"


def reach(name: str) -> frozenset[str]:
    """Everything that a name stands on, directly or through others."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for imported in graph().get(waiting.pop(), frozenset()) - seen:
            seen.add(imported)
            waiting.append(imported)
    return frozenset(seen)


def test_no_name_stands_on_itself():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"imports run in a circle: {' → '.join(error.args[1])}")


def test_every_name_has_its_layer():
    assert sorted(RANK) == sorted(graph().keys() - {"__init__"})
    assert sum(len(names) for names, _ in LAYERS) == len(RANK), "a name has two"


@pytest.mark.parametrize("name", sorted(RANK))
def test_imports_point_down(name: str):
    above = {other for other in reach(name) if RANK.get(other, 0) > RANK[name]}
    assert not above, f"{name} stands on {sorted(above)}"


def test_what_is_said_to_do_no_io_does_none():
    names = [name for names, what in LAYERS for name in names if what.endswith("no I/O")]
    assert "plans" in names
    assert not {name: found for name in names if (found := reach(name) & IO)}


@pytest.mark.parametrize("name", sorted(graph()))
def test_nothing_below_imports_the_facade_or_what_stands_on_it(name: str):
    if name not in ABOVE_FACADE:
        assert not graph()[name] & {"__init__", *ABOVE_FACADE}


def test_the_rules_see_imports_of_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "keys.py").touch()
    (tmp_path / "consumer").mkdir()
    file = tmp_path / "consumer" / "reader.py"
    forms = {
        "import chasqui.model.keys": ["keys"],
        "import chasqui": ["__init__"],
        "from chasqui import keys, Queue": ["keys", "__init__"],
        "from chasqui.model.keys import Keys": ["keys"],
        "from ..keys import Keys": ["keys"],
        "from .. import keys": ["keys"],
        "from . import acker": ["consumer"],
        "def f():\n    from chasqui.model.keys import Keys": ["keys"],
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
