"""Tiny models of installed plugins, from the tests of their projects.

A package's modules `tiny.py` and `tiny_*.py`, or modules `tests/tiny_*.py` of its project, have `VARIANTS`, or
`ENCODERS` for models without logits, or `MEDIA` for media encoders.

They may have `INERT` and `UNREAD`, arguments of `parametrize_with_checks`, and
`TRANSFORMERS`, models of Hugging Face's transformers by the name of the architecture.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import attrs

from llamacli.testing.hugging_face import HuggingFaceModel
from llamacli.testing.tiny import Variant


@attrs.frozen
class TinyModels:
    """Tiny models of a project; without `variants` made from a table."""

    variants: Mapping[str, Variant] | None = None
    inert: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    transformers: Mapping[str, Sequence[HuggingFaceModel]] = attrs.field(factory=dict)

    def originals(self, architecture: str) -> Sequence[HuggingFaceModel]:
        """Models of transformers; by default the one named as the architecture."""
        return self.transformers.get(architecture) or (HuggingFaceModel(architecture.replace("-", "_")),)

    @classmethod
    def of(cls, *paths: Path) -> TinyModels:
        """Run Python files, which can import neighbours; join what they define."""
        modules = [_run(path) for path in paths]

        def joined(name: str) -> dict[str, Any]:
            return {key: value for module in modules for key, value in module.get(name, {}).items()}

        patterns = {name: tuple(x for module in modules for x in module.get(name, ())) for name in ("INERT", "UNREAD")}
        return cls(
            {**joined("VARIANTS"), **joined("ENCODERS"), **joined("MEDIA")} or None,
            patterns["INERT"],
            patterns["UNREAD"],
            joined("TRANSFORMERS"),
        )


def tiny_models_of(distribution: str) -> TinyModels:
    """Tiny models of an installed distribution.

    They are in `tiny.py` or `tiny_*.py` of its package, or in `tests/tiny_*.py` of the folder that it was installed
    from, which its `direct_url.json` names.
    """
    try:
        installed = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return TinyModels()
    origin = installed.read_text("direct_url.json")
    url = urlsplit(json.loads(origin)["url"]) if origin else None
    folder = Path(url2pathname(url.path)) if url and url.scheme == "file" else None
    if folder and (found := [*folder.glob("*/tiny.py"), *folder.glob("tests/tiny_*.py")]):
        return TinyModels.of(*sorted(found))
    own = [Path(str(file.locate())) for file in installed.files or () if re.fullmatch(r"tiny(_\w+)?\.py", file.name)]
    return TinyModels.of(*sorted(own))


def _run(path: Path) -> dict[str, Any]:
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        return runpy.run_path(str(path))
    finally:
        sys.path.remove(folder)
