"""Copies of the demo model."""

from pathlib import Path

import numpy as np

from llamacli.gguf import open_gguf
from llamacli.hub.demo import demo_path

RENAMED = {b"tokenizer.chat_template": b"tokenizer.none_template", b"<|im_": b"<|no_"}
"""Bytes of the template's key, and of ChatML's tokens, by which a missing template would be chosen."""


def write_demo_without_template(folder: Path) -> Path:
    """Write the demo model without its chat template; returns the path."""
    path, data = folder / "demo.gguf", demo_path().read_bytes()
    for name, other in RENAMED.items():
        data = data.replace(name, other)
    path.write_bytes(data)
    return path


def write_demo_variants(folder: Path, n: int) -> list[Path]:
    """Write models with other weights of the last norm; their paths."""
    path = demo_path()
    with open_gguf(path) as file:
        norm = file.data("output_norm.weight").tobytes()
    data, weights = path.read_bytes(), np.frombuffer(norm, np.float32)
    paths = [folder / f"model-{seed:02}.gguf" for seed in range(n)]
    for seed, target in enumerate(paths):
        factors = np.random.default_rng(seed).uniform(0.5, 1.5, weights.shape).astype(np.float32)
        target.write_bytes(data.replace(norm, (weights * factors).tobytes()))
    return paths
