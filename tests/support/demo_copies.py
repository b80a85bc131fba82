"""Copies of the demo model."""

from pathlib import Path

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
