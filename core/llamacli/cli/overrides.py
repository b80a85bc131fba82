"""Options that replace metadata of a model file: `--override-kv`, RoPE scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from llamacli.cli.command import Decorated, in_group
from llamacli.cli.numbers import Integer, Number
from llamacli.cli.options import option
from llamacli.util.settings import MAX_CONTEXT

_BOOLEANS = {"true": True, "false": False}
_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _BOOLEANS.__getitem__, "str": str}

ROPE = {
    "rope_scaling": "{arch}.rope.scaling.type",
    "rope_scale": "{arch}.rope.scaling.factor",
    "rope_freq_base": "{arch}.rope.freq_base",
    "yarn_orig_ctx": "{arch}.rope.scaling.original_context_length",
    "yarn_beta_slow": "{arch}.rope.scaling.yarn_beta_slow",
    "yarn_beta_fast": "{arch}.rope.scaling.yarn_beta_fast",
}
"""Keys that options of RoPE replace."""


class KeyValue(click.ParamType[tuple[str, Any]]):
    """Key and value of metadata: KEY=TYPE:VALUE."""

    name = "key=type:value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """Parse a key, a type and a value."""
        if isinstance(value, tuple):
            return value
        key, _, rest = value.partition("=")
        kind, separator, text = rest.partition(":")
        if not key or not separator or kind not in _TYPES:
            self.fail(f"{value!r} is not KEY=TYPE:VALUE with a type of {', '.join(_TYPES)}.", param, ctx)
        try:
            return key, _TYPES[kind](text)
        except (ValueError, KeyError):
            self.fail(f"{key}: {text!r} is not a value of the type {kind}.", param, ctx)


_OPTIONS = (
    option(
        "--override-kv", type=KeyValue(), multiple=True, metavar="KEY=TYPE:VALUE",
        help="Replace a key of the metadata; TYPE is int, float, bool or str, and {arch} stands for the architecture.",
    ),
    option("--rope-scaling", type=click.Choice(["none", "linear", "yarn"]), help="RoPE scaling method."),
    option("--rope-scale", type=Number(1e-3, 1e6), metavar="N", help="Factor by which the context is extended."),
    option("--rope-freq-base", type=Number(2, 1e12), metavar="N", help="RoPE base frequency."),
    option("--rope-freq-scale", type=Number(1e-6, 1e3), metavar="N", help="1 / N is the factor of --rope-scale."),
    option(
        "--yarn-orig-ctx", type=Integer(1, MAX_CONTEXT), metavar="N",
        help="Context length that the model was trained with, before YaRN.",
    ),
    option("--yarn-beta-slow", type=Number(1e-3, 1e6), metavar="N", help="YaRN's high correction dimension."),
    option("--yarn-beta-fast", type=Number(1e-3, 1e6), metavar="N", help="YaRN's low correction dimension."),
)  # fmt: skip


def override_options(command: Decorated) -> Decorated:
    """Add the options to a command, for `pop_overrides`."""
    return in_group("Model metadata", *_OPTIONS)(command)


def pop_overrides(given: dict[str, Any]) -> dict[str, Any]:
    """Pop the options, values by key; UsageError if they exclude each other."""
    others, freq_scale = given.pop("override_kv"), given.pop("rope_freq_scale")
    rope = {name: given.pop(name) for name in ROPE}
    if freq_scale is not None:
        if rope["rope_scale"] is not None:
            raise click.UsageError("--rope-scale and --rope-freq-scale exclude each other.")
        rope["rope_scale"] = 1 / freq_scale
    return {ROPE[name]: value for name, value in rope.items() if value is not None} | dict(others)
