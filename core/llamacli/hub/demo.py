"""Demo model of this package."""

import importlib.resources
from pathlib import Path


def demo_path() -> Path:
    """Path of the demo model, which tells stories and answers about them."""
    return Path(str(importlib.resources.files("llamacli") / "data" / "demo.gguf"))
