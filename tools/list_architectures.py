"""Writer of the core's list of architectures: `python tools/list_architectures.py`.

Which plugin runs a file is known without installing it, from this list alone. Names and models are those of
the plugins' pyproject.toml.
"""

import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "core" / "llamacli" / "data" / "architectures.json"


def listed() -> str:
    """Plugins and models as JSON; KeyError for a name without models."""
    found = {}
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        content = tomllib.loads(path.read_text())
        models = content["tool"]["llamacli"]["models"]
        for name in content["project"]["entry-points"].get("llamacli.architectures", {}):
            found[name] = {"plugin": content["project"]["name"], "models": models[name]}
    return json.dumps(found, indent=0, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(listed())
