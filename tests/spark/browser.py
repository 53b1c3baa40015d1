"""A page in a real browser: Chromium, headless, asked for facts about what it has laid out."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

#: Looks at a page in a frame, which is as wide as the screen it stands for.
_LOOK = """
function look(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, facts = {};
  const isText = node => node.nodeType === 3 && node.data.trim();
  const boxes = element => [...element.childNodes].filter(isText).flatMap(node => {
    const range = page.createRange();
    range.selectNodeContents(node);
    return [...range.getClientRects()].filter(box => box.width);
  });
  const shown = [...page.body.querySelectorAll("*")].filter(one => boxes(one).length);
  const outside = (box, space) => box.left < space.left - 1 || box.right > space.right + 1;
  const words = one => one.textContent.trim().slice(0, 40);
  facts.width = view.innerWidth;
  facts.scroll = page.documentElement.scrollWidth;
  facts.texts = shown.length;
  facts.cut = shown.filter(one => {
    const tile = one.closest(".tile, td, .note, .plot") || page.body;
    const space = tile.classList.contains("plot") ? page.body : tile;
    return boxes(one).some(box => outside(box, space.getBoundingClientRect()));
  }).map(words);
  const axes = [...page.querySelectorAll(".x, .y")].map(axis => [...axis.children].flatMap(boxes));
  const meet = (a, b) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  facts.meeting = axes.flatMap(all => all.filter((a, i) => all.slice(0, i).some(b => meet(a, b))));
  facts.axes = axes.length;
  facts.bare_axes = axes.filter(all => all.length < 2).length;
  const size = one => parseFloat(view.getComputedStyle(one).fontSize);
  facts.small = shown.filter(one => size(one) < 10).map(words);
  const numbers = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const [r, g, b] = numbers(color).slice(0, 3).map(one => one / 255)
      .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = one => {
    const color = view.getComputedStyle(one).backgroundColor;
    return numbers(color)[3] === 0 ? behind(one.parentElement) : color;
  };
  facts.faint = shown.filter(one => {
    const pair = [light(view.getComputedStyle(one).color), light(behind(one))];
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05) < 4.5;
  }).map(words);
  facts.dark = light(view.getComputedStyle(page.body).backgroundColor) < 0.2;
  facts.hovered = [...page.querySelectorAll(".tips")].map(tips => {
    tips.scrollIntoView({block: "center"});
    const box = tips.getBoundingClientRect();
    const found = page.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    return found !== null && found.parentElement === tips && found.firstChild.tagName === "SPAN";
  });
  return facts;
}
"""


def find() -> str | None:
    """Where the browser is; `CHASQUI_CHROMIUM` says so if it is nowhere on PATH."""
    named = os.environ.get("CHASQUI_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


def look(browser: str, page: str, folder: Path, *, dark: bool, widths: tuple[int, ...]) -> Any:
    """Per width what the page looks like, and under "console" what the browser complained of."""
    frames = "".join(
        f'<iframe width="{width}" height="900" srcdoc="{html.escape(page)}"></iframe>'
        for width in widths
    )
    tell = "document.body.dataset.facts = JSON.stringify([...frames].map(look))"
    whole = (
        f"<!doctype html><meta charset=utf-8><body>{frames}<script>{_LOOK}"
        "const frames = document.querySelectorAll('iframe');"
        f"addEventListener('load', () => {{ {tell} }});</script>"
    )
    path = folder / "frames.html"
    path.write_text(whole, encoding="utf-8")
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--hide-scrollbars", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=5000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = re.search(r'data-facts="([^"]*)"', ran.stdout)
    assert found, ran.stderr
    facts = dict(zip(widths, json.loads(html.unescape(found[1])), strict=True))
    return facts | {"console": re.findall(r".*CONSOLE.*", ran.stderr)}
