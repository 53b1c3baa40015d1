"""A document of headings, paragraphs, tables and images, written as Markdown or as HTML."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Table:
    """The first column is text, the others are numbers unless `texts` counts more."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1


@dataclass(frozen=True)
class Image:
    title: str
    path: str


Block = Heading | Text | Code | Table | Image

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1d2433; background: #fff }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #dde1ea; text-align: right }
th { color: #5a6478; font-weight: 600 } .t { text-align: left }
.PASS { color: #0a7d38; font-weight: 600 } .SHORT { color: #c22a1e; font-weight: 600 }
img { max-width: 100% } code, pre { background: #f3f5f9; border-radius: 4px; padding: .1rem .3rem }
pre { padding: .7rem }
"""


def markdown(blocks: Sequence[Block]) -> str:
    """The document as Markdown."""
    parts = []
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"{'#' * level} {text}")
            case Text(text):
                parts.append(text)
            case Code(text):
                parts.append("\n".join(f"    {line}" for line in text.splitlines()))
            case Table(head, rows, texts):
                rule = ["---"] * texts + ["---:"] * (len(head) - texts)
                lines = [head, rule, *rows]
                parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
            case Image(title, path):
                parts.append(f"![{title}]({path})")
    return "\n\n".join(parts) + "\n"


def page(title: str, blocks: Sequence[Block]) -> str:
    """The document as one HTML page."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"]
    parts.append(f"<style>{_STYLE}</style>")
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"<h{level}>{_inline(text)}</h{level}>")
            case Text(text):
                parts.append(f"<p>{_inline(text)}</p>")
            case Code(text):
                parts.append(f"<pre>{html.escape(text)}</pre>")
            case Table(head, rows, texts):
                parts.append("<table>" + _row("th", head, texts))
                parts += [_row("td", row, texts) for row in rows]
                parts.append("</table>")
            case Image(alt, path):
                parts.append(f'<img src="{html.escape(path)}" alt="{html.escape(alt)}">')
    return "\n".join(parts) + "\n"


def _row(tag: str, cells: Sequence[str], texts: int) -> str:
    made = []
    for i, cell in enumerate(cells):
        names = ["t"] if i < texts else []
        names += [cell] if cell in ("PASS", "SHORT") else []
        kind = f' class="{" ".join(names)}"' if names else ""
        made.append(f"<{tag}{kind}>{_inline(cell)}</{tag}>")
    return f"<tr>{''.join(made)}</tr>"


def _inline(text: str) -> str:
    escaped = html.escape(text)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
