"""Run large language models on CPUs.

    import llamacli

    with llamacli.load_model("model.gguf") as model, model.create_session() as session:
        for token in session.generate("Once upon a time", max_tokens=64):
            print(token.piece, end="")

Public names are listed in `__init__.pyi` and imported at first use, so that `import llamacli` itself is fast.
"""

import importlib
import logging
import re
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_MODULE_OF: dict[str, str] = {
    name: home for home, name in re.findall(r"^from (llamacli\.\S+) import (\w+)", _STUB, re.M)
}

__all__ = list(_MODULE_OF)

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_MODULE_OF, *(name for name in globals() if name.startswith("__") and name.endswith("__"))})
