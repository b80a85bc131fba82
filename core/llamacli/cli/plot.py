"""Pictures of what commands measure and show, drawn by matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamacli.cli.output import human_bytes

if TYPE_CHECKING:
    from llamacli.gguf import TensorInfo
    from llamacli.tools.bench import Row

_FORMATS = (".png", ".svg", ".pdf")
_MIB = 2**20
_TICKS = 24
_REST = -2
"""Where what is in no layer is drawn: a little apart from layer 0."""


class Picture(click.Path):
    """The name of a picture to write, found to be possible before anything is measured for it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name, the folder, and that there is something to draw with."""
        path = Path(value)
        if path.suffix.lower() not in _FORMATS:
            self.fail(f"{value!r} does not end in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}.", param, ctx)
        if not path.absolute().parent.is_dir():
            self.fail(f"{value!r} lies in a folder that is not there.", param, ctx)
        if importlib.util.find_spec("matplotlib") is None:
            self.fail("pictures need matplotlib: pip install 'llamacli[plot]'", param, ctx)
        return str(value)


def draw_rates(rows: Sequence[Row], path: str) -> None:
    """Tokens a second as bars, with their spread: prompts on the left, generation on the right."""
    from matplotlib.figure import Figure

    panels = [
        (title, chosen)
        for title, chosen in (
            ("prompt", [row for row in rows if row.n_prompt]),
            ("generation", [row for row in rows if not row.n_prompt]),
        )
        if chosen
    ]
    if not panels:
        return
    widths = [1 + len(chosen) for _, chosen in panels]
    figure = Figure(figsize=(max(4.0, 1.0 * sum(widths)), 4.0), layout="constrained")
    all_axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    for axes, (title, chosen) in zip(all_axes, panels, strict=True):
        bars = axes.bar(
            [row.test.replace(" @ ", "\n@ ") for row in chosen], [row.avg_ts for row in chosen],
            yerr=[row.stddev_ts for row in chosen], capsize=4, color="#4c78a8",
        )  # fmt: skip
        axes.bar_label(bars, fmt=lambda rate: f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}", padding=2)
        axes.margins(y=0.15)
        axes.set_title(title)
        axes.set_ylabel("tokens a second")
    first = rows[0]
    figure.suptitle(f"{first.model_filename}: {first.model_type}, {first.n_threads} threads")
    figure.savefig(path, dpi=150)


def draw_sizes(title: str, tensors: Iterable[TensorInfo], path: str) -> None:
    """Bytes of a model's tensors: by type on the left, by layer on the right, what is in no layer first."""
    from matplotlib.figure import Figure

    by_type: Counter[str] = Counter()
    by_place: dict[int, Counter[str]] = {}
    for info in tensors:
        found = re.match(r"blk\.(\d+)\.", info.name)
        by_type[info.type.name] += info.n_bytes
        by_place.setdefault(int(found[1]) if found else -1, Counter())[info.type.name] += info.n_bytes
    places = sorted(by_place)
    xs = [place if place >= 0 else _REST for place in places]
    figure = Figure(figsize=(7.0 + 0.15 * len(places), 4.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3 + 0.1 * len(places)))
    bottom = [0.0] * len(places)
    for number, (name, n_bytes) in enumerate(by_type.most_common()):
        color = f"C{number % 10}"
        left.bar_label(left.barh(name, n_bytes / _MIB, color=color), labels=[human_bytes(n_bytes)], padding=2)
        heights = [by_place[place][name] / _MIB for place in places]
        right.bar(xs, heights, bottom=bottom, color=color)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    left.invert_yaxis()
    left.margins(x=0.6)
    left.set_title("by type")
    left.set_xlabel("MiB")
    layers = [place for place in places if place >= 0]
    ticks = {x: str(x) for x in layers[:: -(-len(layers) // _TICKS) or 1]} | ({_REST: "rest"} if _REST in xs else {})
    right.set_xticks(list(ticks), list(ticks.values()))
    right.set_title("by layer and type")
    right.set_xlabel("layer (rest: embedding, output, and whatever belongs to no layer)")
    right.set_ylabel("MiB")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
