"""Names and shapes of tensors of `checkpoint_models`, as transformers saves them.

Run it from `tests/` with an interpreter that has torch and transformers:

    PYTHONPATH=support:. python -m oracle.checkpoint_shapes [NAME ...]
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import checkpoint_models as models

OTHERS = re.compile(r"visual\.|vision_|audio_|projector\.")
"""Tensors of pictures and sound, of which those of patches alone are recorded."""


def shapes(case: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors in a folder that transformers writes."""
    import transformers
    from safetensors import safe_open

    config = transformers.AutoConfig.for_model(case["model_type"], **case["config"])
    kind: Any = getattr(transformers, case["architectures"][0], transformers.AutoModelForCausalLM)
    model = kind(config) if kind is not transformers.AutoModelForCausalLM else kind.from_config(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            names = [name for name in list(file.keys()) if not OTHERS.search(name) or "patch_embed" in name]
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def main() -> None:
    """Record the shapes of all models, or of those named."""
    recorded = json.loads(models.SHAPES.read_text()) if models.SHAPES.exists() else {}
    for name in sys.argv[1:] or models.MODELS:
        recorded[name] = models.compact(shapes(models.MODELS[name]))
    text = ",\n".join(
        f' "{name}": {{\n' + ",\n".join(f'  "{key}": {value}' for key, value in recorded[name].items()) + "\n }"
        for name in sorted(recorded)
    )
    models.SHAPES.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main()
