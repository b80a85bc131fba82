"""Test helpers for plugins: tiny models, float64 formulas, single kernels.

`models` writes small random GGUF files, `vocabularies` the metadata of small tokenizers, `chats` has conversations to
render, `formulas` the mathematics of the ops in float64, `kernels` runs one kernel on arrays, `conformance` compares an
op's kernel with its reference, `serving` has an engine for tests of the server, and `guarded` is a pytest plugin that
ends the process where a kernel leaves its memory.
The extra `testing` installs what they need.
"""
