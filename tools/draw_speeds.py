"""Chart of speeds as an SVG: `python tools/draw_speeds.py`.

Its numbers are those of the table in docs/performance.md. Writes docs/pictures/speeds.svg. Needs the extra `pictures`.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
PATH = ROOT / "docs" / "pictures" / "speeds.svg"


class Speed(NamedTuple):
    """Row of the chart.

    A task, the ratio of speeds, its quartiles, and tokens per second of both programs.
    """

    task: str
    ratio: float
    low: float
    high: float
    ours: float
    theirs: float


def speeds(page: str) -> list[Speed]:
    """Rows of the table, those of two files apart."""
    found = []
    for row in re.findall(r"^\| ((?:prompt|generate)[ ,].*) \|$", page, re.MULTILINE):
        task, ratio, spread, ours, theirs = (cell.split(" / ") for cell in row.split(" | "))
        for i, ratio_i in enumerate(ratio):
            low, high = spread[i].split(" to ")
            name = task[0] if i == 0 else f"{task[0].rpartition(' ')[0]} {task[i]}"
            numbers = map(float, (ratio_i, low, high, ours[i], theirs[i]))
            found.append(Speed(name, *numbers))
    return found


def draw(rows: list[Speed], path: Path) -> None:
    """Write the chart."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "llamacli", "font.family": "sans-serif"})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8.3, 0.36 * len(rows) + 1.2), layout="constrained")
    places = range(len(rows))
    colours = ["#4c78a8" if row.ratio >= 1 else "#c9a227" for row in rows]
    errors = [[row.ratio - row.low for row in rows], [row.high - row.ratio for row in rows]]
    axes.barh(places, [row.ratio for row in rows], color=colours, height=0.62)
    axes.errorbar([row.ratio for row in rows], places, xerr=errors, fmt="none", ecolor="#333", elinewidth=1, capsize=2)
    for place, row in zip(places, rows, strict=True):
        text = f"{row.ratio:g}   ({row.ours:g} and {row.theirs:g} tok/s)"
        axes.text(max(row.high, 1) + 0.06, place, text, va="center", fontsize=8, color="#333")
    axes.axvline(1, color="#333", linewidth=1)
    axes.set_yticks(places, [row.task for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.36 * max(row.high for row in rows))
    axes.set_xlabel("speed of llamacli divided by that of llama.cpp; line: quartiles", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(speeds(PAGE.read_text(encoding="utf-8")), PATH)
