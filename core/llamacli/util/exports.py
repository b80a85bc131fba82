"""Public names of a module that are imported at their first use."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def exports(module: str, file: str) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """Modules of a module's public names, its `__getattr__` and its `__dir__`.

    The stub file beside `file` lists the names, one import a line: `from module import Name as Name`.
    """
    stub = Path(file).with_suffix(".pyi").read_text("utf-8")
    module_of = {name: home for home, name in re.findall(r"^from (llamacli\.\S+) import (\w+)", stub, re.M)}
    names = vars(sys.modules[module])

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        names[name] = getattr(importlib.import_module(module_of[name]), name)
        return names[name]

    return module_of, get, lambda: sorted({*module_of, *(name for name in names if name[:2] == name[-2:] == "__")})
