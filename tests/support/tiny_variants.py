"""Tiny models that goldens are recorded of, by name.

Each family's plugin has modules `tests/tiny_*.py` with `VARIANTS`: by name, a writer, its options, and the bound of the
NMSE of fp32 mode against the peer, which rounds within some functions even in float32. `ENCODERS` are those of models
without logits, `CLASSIFIERS` of rerankers, `HEADS` draft heads, `TRANSFORMERS` models of transformers by architecture.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paths import PLUGINS, add_plugin_paths

add_plugin_paths()


@dataclass(frozen=True)
class Variant:
    """Writer of a tiny model, `write(path, **options)`, its exactness, and its plugin."""

    write: Callable[..., Path]
    options: dict[str, Any]
    exact: float
    family: str


_MODULES = {
    importlib.import_module(path.stem): path.parents[1].name for path in sorted(PLUGINS.glob("*/tests/tiny_*.py"))
}


def _variants(kind: str) -> dict[str, Variant]:
    return {
        name: Variant(*variant, family)
        for module, family in _MODULES.items()
        for name, variant in getattr(module, kind, {}).items()
    }


VARIANTS = _variants("VARIANTS")
ENCODERS = _variants("ENCODERS")
CLASSIFIERS = _variants("CLASSIFIERS")
HEADS = _variants("HEADS")
TRANSFORMERS = {name: models for module in _MODULES for name, models in getattr(module, "TRANSFORMERS", {}).items()}


def write(path: Path, variant: str, **options: Any) -> Path:
    """Write a variant, with other options on top; `metadata` is merged."""
    made = (VARIANTS | ENCODERS | CLASSIFIERS)[variant]
    metadata = made.options.get("metadata", {}) | options.get("metadata", {})
    return made.write(path, **made.options | options | {"metadata": metadata})
