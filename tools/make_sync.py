"""Makes chasqui/sync.py out of chasqui/queue.py: `make sync`.

The source keeps its comments and its layout: its syntax tree only says where to edit it.

- `async` and `await` go, and `Awaitable[T]` becomes `T`.
- Names of the asyncio side become those of the blocking side: see RENAMED.
- A statement whose first line ends with `# async only` is left out, with the comment lines right
  above it.
- A twin brings its own docstrings, and whatever only the blocking side has: see TWINS.

ruff then sorts the imports, tidies up what the edits leave behind, and formats the result. What has
no translation raises Untranslatable.
"""

import argparse
import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARK = b"# async only"

#: What the source imports, and what stands in its place; other uses of the name follow.
RENAMED = {
    "asyncio": "time",
    "chasqui.events.job_end_watcher.JobEndWatcher": (
        "chasqui.events.blocking_job_end_watcher.BlockingJobEndWatcher"
    ),
    "chasqui.model.config.CredentialProvider": "chasqui.model.config.AnyCredentialProvider",
    "chasqui.model.job.Job": "chasqui.model.sync_job.Job",
    "chasqui.model.job.job_factory": "chasqui.model.sync_job.job_factory",
    "chasqui.producing.shared_wait.DurableConnection": (
        "chasqui.producing.shared_wait.BlockingDurableConnection"
    ),
    "chasqui.transport.connection.Connection": "chasqui.transport.blocking.BlockingConnection",
    "collections.abc.AsyncIterator": "collections.abc.Iterator",
    "contextlib.AsyncExitStack": "contextlib.ExitStack",
}
#: Names that are not imported.
METHODS = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "push_async_callback": "callback",
}
NAMES = METHODS | {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in RENAMED.items()}
#: Rules of ruff that the edits break: order of imports, unused ones, a loop that is now a plain
#: `yield from`, a variable that is now only returned.
TIDIED = "I,F401,UP028,RET504"
#: All of asyncio that `time` has too.
SHARED_WITH_TIME = ("sleep",)


@dataclass(frozen=True)
class Twin:
    """A module, and the one that is made out of it."""

    source: str
    target: str
    #: By the name of the class, and of the module by the empty one.
    docstrings: dict[str, str] = field(default_factory=dict)
    #: Stands behind the imports.
    added: str = ""


TWINS = (
    Twin(
        "chasqui/queue.py",
        "chasqui/sync.py",
        docstrings={
            "": """\
The same queue without an event loop: for scripts, threads, web workers, forked children.

Nothing runs between two calls, no thread and no loop; transport/blocking.py says what a call does.
""",
            "Queue": """\
Adds jobs to a named queue and manages them: `chasqui.Queue`, without `await`.

Any number of threads may share one. After a fork, parent and child have a connection each.
`credential_provider` may be a plain function.
""",
        },
        added="""\
from chasqui.events.stream import BlockingQueueEvents as QueueEvents

__all__ = ["Job", "Queue", "QueueEvents"]
""",
    ),
)


class Untranslatable(Exception):
    """The source holds something that this tool cannot turn into blocking code."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    for twin in TWINS:
        (ROOT / twin.target).write_text(made(twin))


def made(twin: Twin) -> str:
    """The text of the twin's target, as it should be now."""
    header = f"# Generated from {twin.source} by `make sync`: edit that file, not this one.\n"
    text = header + translated((ROOT / twin.source).read_text(), twin)
    tidy = ("check", "--select", TIDIED, "--fix-only", "--unsafe-fixes")
    text = _ruff(text, twin.target, *tidy)
    return _ruff(text, twin.target, "format")


def _ruff(text: str, path: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "--quiet", "--stdin-filename", path, "-"],
        input=text,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout


def translated(source: str, twin: Twin) -> str:
    """The source as blocking code, not yet formatted."""
    text = Translation(source, twin).apply()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.comprehension) and node.is_async:
            raise Untranslatable(f"an asynchronous comprehension: {ast.unparse(node)}")
    return text


class Translation:
    """The edits that make blocking code of one source. Works on bytes, as syntax trees count."""

    def __init__(self, source: str, twin: Twin) -> None:
        self._source = source.encode()
        self._lines = self._source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._tree = ast.parse(source)
        self._twin = twin
        #: From where, to where, and what goes there instead.
        self._edits: list[tuple[int, int, bytes]] = []

    def apply(self) -> str:
        left_out = list(self._left_out())
        for node in ast.walk(self._tree):
            self._visit(node)
        self._add_behind_imports()
        edits = [
            edit
            for edit in self._edits
            if not any(start <= edit[0] < end for start, end, _ in left_out)
        ]
        text, at = b"", 0
        for start, end, new in sorted(edits + left_out):
            text += self._source[at:start] + new
            at = end
        return (text + self._source[at:]).decode()

    def _left_out(self) -> Iterator[tuple[int, int, bytes]]:
        """The marked statements, each with the comment lines above it."""
        marks = {
            number for number, line in enumerate(self._lines, 1) if line.rstrip().endswith(MARK)
        }
        for node in ast.walk(self._tree):
            if isinstance(node, ast.stmt) and node.lineno in marks:
                marks.discard(node.lineno)
                decorators = getattr(node, "decorator_list", [])
                first = min([node.lineno, *(one.lineno for one in decorators)])
                while self._lines[first - 2].lstrip().startswith(b"#"):
                    first -= 1
                assert node.end_lineno is not None
                yield self._starts[first - 1], self._starts[node.end_lineno], b""
        if marks:
            raise Untranslatable(f"no statement begins on the marked line {min(marks)}")

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.Import():
                self._replace(node, "\n".join(_imports("", node.names)))
            case ast.ImportFrom():
                self._replace(node, "\n".join(_imports(f"{node.module}.", node.names)))
            case ast.AsyncFunctionDef() | ast.FunctionDef():
                if isinstance(node, ast.AsyncFunctionDef):
                    self._drop_word(node, b"async")
                if node.name in NAMES:
                    start = self._source.index(node.name.encode(), self._start(node))
                    self._edit(start, start + len(node.name), NAMES[node.name])
            case ast.AsyncWith() | ast.AsyncFor():
                self._drop_word(node, b"async")
            case ast.Await():
                self._drop_word(node, b"await")
            case ast.Name(id=name) if name in NAMES:
                self._replace(node, NAMES[name])
            case ast.Attribute(value=value, attr=name):
                if isinstance(value, ast.Name) and value.id == "asyncio":
                    if name not in SHARED_WITH_TIME:
                        raise Untranslatable(f"line {node.lineno}: asyncio.{name}")
                elif name in NAMES:
                    end = self._end(node)
                    self._edit(end - len(name), end, NAMES[name])
                self._drop_parentheses(value)
            case ast.Subscript(value=ast.Name(id="Awaitable"), slice=inner):
                self._edit(self._start(node), self._start(inner), "")
                self._edit(self._end(inner), self._end(node), "")
            case ast.Subscript(value=value):
                self._drop_parentheses(value)
        self._replace_docstring(node)

    def _drop_parentheses(self, node: ast.expr) -> None:
        """Those around an `await` whose value is used at once: `(await f()).x`."""
        if isinstance(node, ast.Await):
            opening = self._source.rindex(b"(", 0, self._start(node))
            closing = self._source.index(b")", self._end(node))
            self._edit(opening, opening + 1, "")
            self._edit(closing, closing + 1, "")

    def _replace_docstring(self, node: ast.AST) -> None:
        if isinstance(node, ast.Module | ast.ClassDef):
            name = node.name if isinstance(node, ast.ClassDef) else ""
            if (text := self._twin.docstrings.get(name)) is not None:
                docstring = node.body[0]
                text = textwrap.indent(text, " " * docstring.col_offset)
                self._replace(docstring, f'"""{text.lstrip()}{" " * docstring.col_offset}"""')

    def _add_behind_imports(self) -> None:
        if self._twin.added:
            imports = [
                node for node in self._tree.body if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            end = self._end(imports[-1])
            self._edit(end, end, "\n" + self._twin.added.rstrip())

    def _drop_word(self, node: ast.AST, word: bytes) -> None:
        """The word that a node begins with, and the space behind it."""
        start = self._start(node)
        rest = self._source[start:]
        assert rest.startswith(word)
        self._edit(start, start + len(rest) - len(rest.removeprefix(word).lstrip()), "")

    def _replace(self, node: ast.AST, text: str) -> None:
        self._edit(self._start(node), self._end(node), text)

    def _edit(self, start: int, end: int, text: str) -> None:
        self._edits.append((start, end, text.encode()))

    def _start(self, node: ast.AST) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.AST) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset


def _imports(prefix: str, names: list[ast.alias]) -> Iterator[str]:
    """One import statement for each name, from where the blocking side has it."""
    for one in names:
        path = prefix + one.name
        module, _, name = RENAMED.get(path, path).rpartition(".")
        alias = f" as {one.asname}" if one.asname else ""
        if prefix:
            yield f"from {module} import {name}{alias}"
        else:
            yield f"import {RENAMED.get(path, path)}{alias}"


if __name__ == "__main__":
    main()
