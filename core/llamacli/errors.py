"""Exceptions of llamacli and its plugins.

`LlamaCliError` is the base class. Messages name the input at fault (file, metadata key, tensor, flag, token) and what
is allowed. Errors that only prefix sessions raise are in `llamacli.prefix.errors`.
"""

import contextlib
from collections.abc import Iterator


class LlamaCliError(Exception):
    """Base class of all errors raised by llamacli and its plugins."""


class ModelFormatError(LlamaCliError):
    """A model file is unreadable, malformed or inconsistent."""


class TokenizerError(LlamaCliError):
    """A tokenizer cannot be built, or cannot encode or decode."""


class ChatTemplateError(LlamaCliError):
    """A chat template is missing, broken, or cannot render the conversation."""


class PluginError(LlamaCliError):
    """A plugin failed, broke the contract, or conflicts with another."""


@contextlib.contextmanager
def plugin_errors(part: str) -> Iterator[None]:
    """Convert unexpected exceptions of a plugin to PluginError.

    The message names the `part` of the plugin that failed. LlamaCliError and MemoryError pass unchanged.
    """
    try:
        yield
    except (LlamaCliError, MemoryError):
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = " | ".join(lines[:4]) + (" ... (--debug shows all)" if len(lines) > 4 else "")
        raise PluginError(f"{part} failed: {type(error).__name__}: {text}") from error


class UnknownArchitectureError(PluginError):
    """No installed plugin supports the model's architecture."""


class InvalidRequestError(LlamaCliError, ValueError):
    """An argument is invalid for the model or session."""


class EmbeddingModelError(InvalidRequestError):
    """The model attends in both directions: it embeds texts and generates none."""


class HubError(LlamaCliError):
    """A model cannot be downloaded, or is not in the cache."""


class ContextOverflowError(LlamaCliError):
    """The tokens do not fit into the session's context; nothing was evaluated.

    Attributes: `n_past`, tokens already in the context; `n_tokens`, tokens to add; `seq_len`, the context's length;
    `stage`, the step that failed ("prefix", "suffix", "decode") or "".
    """

    def __init__(self, n_past: int, n_tokens: int, seq_len: int, *, stage: str = ""):
        self.n_past, self.n_tokens, self.seq_len, self.stage = n_past, n_tokens, seq_len, stage
        super().__init__(
            f"context overflow{stage and f' ({stage})'}: "
            f"{n_past} tokens in the context and {n_tokens} more do not fit into {seq_len}"
        )


class CacheFull(LlamaCliError):  # noqa: N818 - other libraries use this name
    """A cache has no room and may not evict anything."""


class OutOfMemoryError(LlamaCliError, MemoryError):
    """The KV cache does not fit into memory; nothing was changed.

    Attributes: `asked`, bytes requested; `available`, bytes available.
    """

    def __init__(self, asked: int, available: int):
        self.asked, self.available = asked, available
        super().__init__(f"out of memory: the KV cache needs {asked} bytes more, and {available} are available")


class StateError(LlamaCliError):
    """A saved state is damaged or incompatible; nothing was restored."""


class ClosedError(LlamaCliError):
    """A model, session or cache was used after close()."""
