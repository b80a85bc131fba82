"""Write the distribution of each architecture to the core's data: `python tools/list_architectures.py`.

Which plugin runs a file is known without installing it, from this list alone.
"""

import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "core" / "llamacli" / "data" / "architectures.json"


def listed() -> str:
    """Content of the list, by the entry points of this project's plugins."""
    found = {}
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        found |= dict.fromkeys(project["entry-points"].get("llamacli.architectures", {}), project["name"])
    return json.dumps(found, indent=0, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(listed())
