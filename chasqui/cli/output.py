"""What commands print: aligned tables for people, tabs for pipes, JSON for programs.

Values from Redis may hold anything. Control characters are escaped, so that a job's name cannot
send commands to the reader's terminal.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import typer

# Not printable by Python's rules, but harmless, and emoji are made of them.
_JOINERS = "\u200c\u200d"
# Characters that JSON leaves as they are and that a terminal obeys.
_OBEYED = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def show(record: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one thing: a line for each of its fields."""
    if as_json:
        _print_json(record)
        return
    width = max((len(name) for name in record), default=0)
    separator, width = ("  ", width) if sys.stdout.isatty() else ("\t", 0)
    for name, value in record.items():
        first, *rest = _lines(value)
        print(f"{name:<{width}}{separator}{first}")
        for line in rest:
            print(f"{'':<{width}}{separator}{line}")


def show_all(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    as_json: bool,
    nothing: str,
    spare: Sequence[str] = (),
) -> None:
    """Print many things of a kind: a row each, or the text `nothing` if there are none.

    `spare` names columns that are left out in a terminal, which is 80 characters wide.
    """
    rows = list(rows)
    if as_json:
        names = [column.replace(" ", "_") for column in columns]
        _print_json([dict(zip(names, row, strict=True)) for row in rows])
    elif not rows:
        print(nothing)
    elif sys.stdout.isatty():
        kept = [i for i, column in enumerate(columns) if column not in spare]
        print_table([columns[i] for i in kept], [[row[i] for i in kept] for row in rows])
    else:
        print("\t".join(columns))
        for row in rows:
            print("\t".join(map(cell, row)))


def say(sentence: str, facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print an outcome: a sentence for people, or its facts as JSON."""
    if as_json:
        _print_json(facts)
    else:
        print(sentence)


def show_each(
    job_ids: Sequence[str], outcomes: Sequence[bool], yes: str, no: str, *, as_json: bool
) -> None:
    """Print what became of each job, the word `yes` or `no`. Exit code 1 if there is a `no`."""
    rows = [(one, yes if done else no) for one, done in zip(job_ids, outcomes, strict=True)]
    show_all(("job id", "outcome"), rows, as_json=as_json, nothing="")
    if not all(outcomes):
        raise typer.Exit(1)


def cell(value: Any) -> str:
    """A value on one line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return escaped(value if isinstance(value, str) else to_json(value))


def escaped(text: str) -> str:
    """The text with every character escaped that a terminal would obey."""
    return text if text.isprintable() else "".join(map(_escape, text))


def as_names(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a table, with names for programs: `DLQ depth` becomes `dlq_depth`."""
    bare = str.maketrans(" ", "_", "()")
    return {name.lower().translate(bare): value for name, value in rows.items()}


def print_json_line(value: Any) -> None:
    """Print one of several JSON objects, each on its own line, and flush it."""
    print(to_json(value), flush=True)


def tell_url(url: str, *, as_json: bool) -> None:
    """Print the URL of a server that has just started."""
    if as_json:
        print_json_line({"url": url})
    else:
        print(url, flush=True)


def at_ms(unix_ms: int) -> datetime | int:
    """A time from Redis as a datetime; the number itself if no calendar has that moment."""
    try:
        return datetime.fromtimestamp(unix_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return unix_ms


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    title: str | None = None,
    file: TextIO | None = None,
) -> None:
    """Print a table that fits the terminal, by default on stdout."""
    # Imported here: piped output and JSON do not need it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        is_number = all(isinstance(row[i], int) for row in rows)
        table.add_column(
            column,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=all(isinstance(row[i], datetime) for row in rows),
        )
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    console = Console(highlight=False, file=file)
    if title is not None:
        console.print(Text(escaped(title), style="bold underline"))
    console.print(table)
    if title is not None:
        console.print()


def _lines(value: Any) -> list[str]:
    if isinstance(value, str) and "\n" in value:
        return [escaped(line) for line in value.splitlines()] or [""]
    return [cell(value)]


def _escape(char: str) -> str:
    return (
        char
        if char.isprintable() or char in _JOINERS
        else char.encode("unicode_escape").decode("ascii")
    )


def _print_json(value: Any) -> None:
    print(to_json(value, indent=2 if sys.stdout.isatty() else None))


def to_json(value: Any, indent: int | None = None) -> str:
    """The value as JSON that every parser accepts and that no terminal obeys."""
    text = json.dumps(_plain(value), ensure_ascii=False, indent=indent, default=str)
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _plain(value: Any) -> Any:
    """A value that msgpack can hold as one that JSON can: bytes become text, with invalid UTF-8
    escaped; NaN and infinity become text."""
    if isinstance(value, Mapping):
        return {_key(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, datetime):
        return cell(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _key(name: Any) -> str:
    return name if isinstance(name, str) else str(_plain(name))
