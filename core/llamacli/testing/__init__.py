"""Testing tools for plugins: conformance checks, tiny model files.

`models` writes small random GGUF files, `tiny` those of each variant of an architecture, `vocabularies` the metadata of
small tokenizers. `checks`, `result_checks` and `parametrize` check an architecture, `conformance` compares an op's
kernel with its reference, `scaffold` writes a plugin to begin with, `installed` finds the tiny models of a plugin,
`peer` and `dump` run llama.cpp, `hugging_face` models of transformers. `chats` has conversations to render, `formulas`
the mathematics of the ops in float64, `serving` has an engine for tests of the
server, and `guarded` is a pytest plugin that ends the process where a kernel leaves its memory. The extra `testing`
installs what they need.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamacli.testing.checks import check_shapes
    from llamacli.testing.conformance import ConformanceError, check_op
    from llamacli.testing.hugging_face import HuggingFaceModel
    from llamacli.testing.models import write_model
    from llamacli.testing.parametrize import checks_of, parametrize_with_checks
    from llamacli.testing.tiny import write_architecture

__all__ = [
    "ConformanceError",
    "HuggingFaceModel",
    "check_op",
    "check_shapes",
    "checks_of",
    "parametrize_with_checks",
    "write_architecture",
    "write_model",
]

_MODULES = {
    "ConformanceError": "conformance",
    "check_op": "conformance",
    "HuggingFaceModel": "hugging_face",
    "check_shapes": "checks",
    "checks_of": "parametrize",
    "parametrize_with_checks": "parametrize",
    "write_architecture": "tiny",
    "write_model": "models",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use.

    The guard of memory must be installed before engines are imported.
    """
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"llamacli.testing.{_MODULES[name]}"), name)
