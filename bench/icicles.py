"""Draws a profile: each function a bar as wide as its share of the time, above what it calls."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What a bar's colour says: the place where its function lives, known by the end of its label.
HOMES = {
    "chasqui, compiled": ("#d1495b", re.compile(r"\(_core\)$")),
    "chasqui, Python": ("#edae49", re.compile(r"\(chasqui\)$")),
    "event loop": ("#00798c", re.compile(r"\((event loop)\)$")),
    "everything else": ("#c9d1dc", re.compile("")),
}
#: Narrower bars are not drawn, and narrower ones than the second have no text.
LEAST, LEAST_WITH_TEXT = 0.002, 0.03
#: Characters that fit into the whole width.
WIDTH = 190
#: What all work of an event loop is called from.
ENTRY = "Runner.run"
#: Frames that the debugger makes up from inlined code.
INLINED = re.compile(r"\((object|queue)\.h\)$|^0x")
#: Files of uvloop, libuv and asyncio's C part.
LOOP_FILES = re.compile(r"(loop|core|linux|stream|loop-watcher|timer|_asynciomodule)\.c$")


@dataclass
class Frame:
    """A function as it was called from one place: its samples, and what it called."""

    samples: int = 0
    calls: dict[str, "Frame"] = field(default_factory=dict)

    @classmethod
    def read(cls, stacks: str) -> "Frame":
        """The tree of what an event loop does, from lines of frames, outermost first, and a number
        of samples. Imports and other threads are left out."""
        root = cls()
        for line in stacks.splitlines():
            frames, _, count = line.rpartition(" ")
            _, is_inside, inner = frames.partition(ENTRY)
            if not is_inside:
                continue
            frame, before = root, ""
            frame.samples += int(count)
            for name in map(label, inner.split(";")[1:]):
                if name != before and not INLINED.search(name):
                    frame, before = frame.calls.setdefault(name, cls()), name
                    frame.samples += int(count)
        return root


def draw_flames(stacks: str, title: str, target: Path) -> Path:
    """Write the picture of a profile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    root = Frame.read(stacks)
    while len(root.calls) == 1:  # what everything is called from says nothing
        (root,) = root.calls.values()
    depth = _depth(root, root.samples)
    figure, axes = pyplot.subplots(figsize=(11, 0.17 * depth + 1.0), layout="constrained")
    _draw(axes, root, 0.0, 0, root.samples)
    axes.set_xlim(0, 1)
    axes.set_ylim(depth, 0)
    axes.set_axis_off()
    axes.set_title(f"{title}: {root.samples:,} samples", loc="left", fontsize=10)
    patches = [Patch(color=colour, label=home) for home, (colour, _) in HOMES.items()]
    figure.legend(handles=patches, fontsize=8, frameon=False, ncols=4, loc="outside lower left")
    figure.savefig(target, dpi=100)
    pyplot.close(figure)
    return target


def label(frame: str) -> str:
    """A frame as `function (home)`: the package of ours, or the file without its folders."""
    found = re.fullmatch(r"(.*?) \((.*?)(?::\d+)?\)", frame)
    if found is None:
        return frame
    function, path = found.groups()
    function = re.sub(r"^__pyx_\w*?chasqui_5_core_\d+", "", function)
    folders = path.split("/")
    if "uvloop" in folders or "asyncio" in folders or LOOP_FILES.match(folders[-1]):
        return f"{function} (event loop)"
    for home in ("_core", "chasqui"):
        if home in folders[:-1]:
            return f"{function} ({home})"
    return f"{function} ({folders[-1]})"


def _depth(frame: Frame, total: int) -> int:
    drawn = (each for each in frame.calls.values() if each.samples >= LEAST * total)
    return 1 + max((_depth(each, total) for each in drawn), default=0)


def _draw(axes: "Axes", frame: Frame, left: float, level: int, total: int) -> None:
    for name, call in sorted(frame.calls.items()):
        width = call.samples / total
        if width >= LEAST:
            colour = next(colour for colour, home in HOMES.values() if home.search(name))
            axes.barh(
                level + 0.5, width, 0.94, left, color=colour, edgecolor="white", linewidth=0.4
            )
            if width >= LEAST_WITH_TEXT:
                text = name[: int(width * WIDTH)]
                axes.text(left + 0.001, level + 0.5, text, va="center", fontsize=6, clip_on=True)
            _draw(axes, call, left, level + 1, total)
        left += width
