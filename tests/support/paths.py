"""Import paths of the plugins and of their tests' helpers."""

import sys
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"


def add_plugin_paths() -> None:
    """Make plugins importable, and the modules beside their tests."""
    folders = sorted(path.parent for path in PLUGINS.glob("*/pyproject.toml"))
    paths = [str(path) for folder in folders for path in (folder, folder / "tests")]
    sys.path[:0] = [path for path in paths if path not in sys.path]
