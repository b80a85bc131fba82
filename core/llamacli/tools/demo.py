"""Demo model of this package."""

import importlib.resources
from pathlib import Path


def demo_path() -> Path:
    """Path of the demo model, a very small one that writes stories."""
    return Path(str(importlib.resources.files("llamacli") / "data" / "demo.gguf"))
