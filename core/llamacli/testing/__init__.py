"""Testing tools for plugins: conformance checks, tiny model files.

`models` writes small random GGUF files, `tiny` those of each variant of an architecture, `tiny_media` those of media
encoders, `vocabularies` the metadata of small tokenizers.

`checks`, `result_checks` and `parametrize` check an architecture, `conformance` compares an op's
kernel with its reference, `scaffold` writes a plugin to begin with, `installed` finds the tiny models of a plugin,
`peer`, `peer_media` and `dump` run llama.cpp, `hugging_face` models of transformers.

`chats` has conversations to render, `formulas`
the mathematics of the ops in float64, and `guarded` is a pytest plugin that ends the process where a kernel leaves its
memory. The extra `testing` installs what they need.

Public names are listed in `__init__.pyi` and imported at first use: the guard of memory must be installed before
engines are imported.
"""

from llamacli.util.exports import exports

_MODULE_OF, __getattr__, __dir__ = exports(__name__, __file__)

__all__ = list(_MODULE_OF)
