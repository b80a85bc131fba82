"""Plots of benchmarks and tensor sizes with matplotlib, an optional dependency."""

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
"""Position of tensors outside of layers on the x axis, apart from layer 0."""


class ImagePath(click.Path):
    """Parameter type for an image file to write."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the extension, the directory, and that matplotlib is installed."""
        path = Path(value)
        if path.suffix.lower() not in _FORMATS:
            self.fail(f"{value!r} does not end in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}.", param, ctx)
        if not path.absolute().parent.is_dir():
            self.fail(f"{value!r} is in a directory that does not exist.", param, ctx)
        if importlib.util.find_spec("matplotlib") is None:
            self.fail("plots need matplotlib: pip install 'llamacli[plot]'", param, ctx)
        return str(value)


def plot_rates(rows: Sequence[Row], path: str) -> None:
    """Plot tokens per second as bars with standard deviations."""
    from matplotlib.figure import Figure

    kinds = {"prompt": [row for row in rows if row.n_prompt], "generation": [row for row in rows if not row.n_prompt]}
    panels = {title: chosen for title, chosen in kinds.items() if chosen}
    if not panels:
        return
    widths = [1 + len(chosen) for chosen in panels.values()]
    figure = Figure(figsize=(max(4.0, 1.0 * sum(widths)), 4.0), layout="constrained")
    all_axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    for axes, (title, chosen) in zip(all_axes, panels.items(), strict=True):
        bars = axes.bar(
            [row.test.replace(" @ ", "\n@ ") for row in chosen], [row.avg_ts for row in chosen],
            yerr=[row.stddev_ts for row in chosen], capsize=4, color="#4c78a8",
        )  # fmt: skip
        axes.bar_label(bars, fmt=lambda rate: f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}", padding=2)
        axes.margins(y=0.15)
        axes.set_title(title)
        axes.set_ylabel("tokens per second")
    first = rows[0]
    figure.suptitle(f"{first.model_filename}: {first.model_type}, {first.n_threads} threads")
    figure.savefig(path, dpi=150)


def plot_sizes(title: str, tensors: Iterable[TensorInfo], path: str) -> None:
    """Plot bytes of tensors, by type and by layer."""
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
    right.set_xlabel("layer (rest: embedding, output and other tensors outside of layers)")
    right.set_ylabel("MiB")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
