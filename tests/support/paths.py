"""Import paths and entry points of this repository's plugins."""

import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from llamacli.plugins import GROUPS

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
CORE, EXAMPLES = PLUGINS.with_name("core"), PLUGINS.with_name("examples")


def add_plugin_paths() -> None:
    """Make plugins importable, and the modules beside their tests."""
    folders = sorted(path.parent for path in PLUGINS.glob("*/pyproject.toml"))
    paths = [str(path) for folder in folders for path in (folder, folder / "tests")]
    sys.path[:0] = [path for path in paths if path not in sys.path]


def entry_points() -> list[EntryPoint]:
    """Entry points of all plugins here, whatever is installed."""
    projects = [tomllib.loads(path.read_text())["project"] for path in sorted(PLUGINS.glob("*/pyproject.toml"))]
    return [
        EntryPoint(name, module, group)
        for project in projects
        for group in GROUPS
        for name, module in project["entry-points"].get(group, {}).items()
    ]


def is_of_this_project(found: type) -> bool:
    """Test for a class of the core, a plugin or an example."""
    source = getattr(sys.modules.get(found.__module__), "__file__", None)
    return source is not None and any(
        Path(source).resolve().is_relative_to(folder) for folder in (CORE, PLUGINS, EXAMPLES)
    )
