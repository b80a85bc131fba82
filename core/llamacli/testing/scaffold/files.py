"""Files of skeletons: a distribution with tests."""

from __future__ import annotations

import importlib.resources
import json
import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.testing.scaffold.declarations import Declarations
from llamacli.testing.scaffold.description import Description
from llamacli.testing.scaffold.forward import Forward
from llamacli.testing.scaffold.tiny_keys import tiny_keys

_INERT = '''
INERT = ["*.attn_k.bias"]
"""Tensors that change no logit: this one cancels out in softmax where there is no RoPE."""
'''


def write_plugin(folder: Path, name: str, description: Description, *, from_file: bool) -> list[Path]:
    """Write a distribution `llamacli-NAME` into a new folder; returns its files.

    Raises InvalidRequestError for a name that is no Python name with hyphens, and if the folder exists.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        raise InvalidRequestError(
            f"the name {name!r} must be lower-case letters, digits and hyphens, a letter first, and no Python keyword"
        )
    if folder.exists():
        raise InvalidRequestError(f"{folder} exists already")
    files = _contents(name, module, description, from_file)
    written = []
    for place, text in files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        written.append(path)
    return written


def _contents(name: str, module: str, description: Description, from_file: bool) -> dict[str, str]:
    class_name = "".join(part.capitalize() for part in module.split("_"))
    code = Declarations(description, class_name)
    values = {
        "name": name,
        "module": module,
        "architecture": description.architecture,
        "class_name": class_name,
        "inert": "" if code.has_rope else _INERT,
        "options": "" if code.has_rope else ", inert=INERT",
        "names": "VARIANTS" if code.has_rope else "INERT, VARIANTS",
        "tiny_keys": _dict(tiny_keys(code)),
        "fields": "\n".join(code.fields()),
        "configure": "\n".join(code.configure()),
        "tensors": "\n".join(code.tensors()),
        "forward": "\n".join(Forward(code).lines()),
    }
    values["bound"] = "1e-5),  # llama.cpp rounds GELU to float16" if "gelu" in values["forward"] else "1e-8),"

    def fill(template: str) -> str:
        source = importlib.resources.files("llamacli").joinpath(f"data/plugin/{template}.tmpl").read_text("utf-8")
        return Template(source).substitute(values)

    init = fill("init.py")
    for name, imported in (("gelu", " gelu,"), ("Rope", " Rope,")):
        if not re.search(rf"\b{name}\b", init.replace(imported, "")):
            init = init.replace(imported, "")
    test = fill("test.py")
    files = {
        "pyproject.toml": fill("pyproject.toml"),
        "README.md": fill("README.md"),
        "MANIFEST.in": "recursive-include tests *.py *.json\n",
        ".github/workflows/test.yml": fill("workflow.yml"),
        f"llamacli_{module}/__init__.py": init,
        f"llamacli_{module}/py.typed": "",
        f"llamacli_{module}/tiny.py": fill("tiny.py"),
        f"tests/test_{module}.py": test,
    }
    if from_file:
        imports = "import json\nfrom pathlib import Path\n\nfrom llamacli.testing import check_shapes, "
        test = test.replace("from llamacli.testing import ", imports) + fill("test_file.py")
        content = {"keys": dict(description.keys), "shapes": {key: list(x) for key, x in description.shapes.items()}}
        files |= {f"tests/test_{module}.py": test, "tests/file.json": json.dumps(content, indent=1) + "\n"}
    return files


def _dict(values: Mapping[str, Any]) -> str:
    return "\n".join(["{", *(f"    {json.dumps(key)}: {_source(value)}," for key, value in values.items()), "}"])


def _source(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_source, value))}]"
    if isinstance(value, str):
        return json.dumps(value)
    return str(np.float32(value)) if isinstance(value, float) else repr(value)
