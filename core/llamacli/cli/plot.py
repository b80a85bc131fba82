"""Pictures of what commands measure, drawn by matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llamacli.bench import Row

_FORMATS = (".png", ".svg", ".pdf")


class Picture(click.ParamType[str]):
    """The name of a picture to write, found to be possible before anything is measured for it."""

    name = "file"

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
            [row.test for row in chosen], [row.avg_ts for row in chosen], yerr=[row.stddev_ts for row in chosen],
            capsize=4, color="#4c78a8",
        )  # fmt: skip
        axes.bar_label(bars, fmt=lambda rate: f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}", padding=2)
        axes.margins(y=0.15)
        axes.set_title(title)
        axes.set_ylabel("tokens a second")
    first = rows[0]
    figure.suptitle(f"{first.model_filename}: {first.model_type}, {first.n_threads} threads")
    figure.savefig(path, dpi=150)
