"""The model that comes with this package."""

import importlib.resources
from pathlib import Path


def demo_path() -> Path:
    """Where it lies: a very small model that tells little stories."""
    return Path(str(importlib.resources.files("llamacli") / "data" / "demo.gguf"))
