"""Every error that llamacli raises on purpose: one hierarchy, so that callers can catch as widely as they like.

Messages name what was wrong (file, metadata key, tensor, flag, token) and, where there is one, the way out.
"""

import contextlib
from collections.abc import Iterator


class LlamaCliError(Exception):
    """Base of all errors raised by llamacli and its plugins."""


class ModelFormatError(LlamaCliError):
    """A model file is unreadable, malformed, or contradicts itself."""


class TokenizerError(LlamaCliError):
    """A vocabulary cannot be built from the file's metadata, or cannot do what was asked of it."""


class ChatTemplateError(LlamaCliError):
    """A chat template is broken or missing, refuses a conversation, or has no place for what the conversation has."""


class PluginError(LlamaCliError):
    """A plugin failed to import, breaks the contract, or claims what another plugin claims."""


@contextlib.contextmanager
def faults_of(part: str) -> Iterator[None]:
    """Run a plugin's code: what it raises without meaning to becomes a PluginError that names the part at fault."""
    try:
        yield
    except (LlamaCliError, MemoryError):
        raise
    except Exception as error:
        raise PluginError(f"{part} failed: {type(error).__name__}: {error}") from error


class UnknownArchitectureError(PluginError):
    """No installed plugin handles the model's architecture."""


class InvalidRequestError(LlamaCliError, ValueError):
    """An argument is outside what the model or the session can do: a token id, a mode, a cache type."""


class HubError(LlamaCliError):
    """A model is not to be had from the hub, or not in its cache."""


class ContextOverflowError(LlamaCliError):
    """The tokens do not fit into the session's context; nothing was evaluated.

    Attributes: `n_past` tokens already in the context, `n_tokens` asked for, `seq_len` the context's length, `stage`
    what was being done, where that was one of several things.
    """

    def __init__(self, n_past: int, n_tokens: int, seq_len: int, *, stage: str = ""):
        self.n_past, self.n_tokens, self.seq_len, self.stage = n_past, n_tokens, seq_len, stage
        super().__init__(
            f"context overflow{stage and f' ({stage})'}: "
            f"{n_past} tokens in the context and {n_tokens} more do not fit into {seq_len}"
        )


class CacheFull(LlamaCliError):  # noqa: N818 - a state rather than a mistake, and named so elsewhere
    """A cache has no room for one more entry, sequence or branch, and may not evict any."""


class OutOfMemoryError(LlamaCliError, MemoryError):
    """The keys and values do not fit into memory; nothing was changed.

    Attributes: `asked`, the bytes that were needed; `available`, the bytes that there were.
    """

    def __init__(self, asked: int, available: int):
        self.asked, self.available = asked, available
        super().__init__(f"out of memory: the KV cache needs {asked} bytes more, and {available} are available")


class StateError(LlamaCliError):
    """A saved state is damaged, of another version, or of another model; nothing was restored from it."""


class ClosedError(LlamaCliError):
    """The model or session was used after close()."""


class SessionClosedError(ClosedError):
    """A prefix session was used after close()."""


class SessionUnavailableError(LlamaCliError):
    """Nothing is registered that makes sessions, or embeds."""


class SessionFatalError(LlamaCliError):
    """The engine failed under a session, which cannot be used any more. `cause` is what was raised first."""

    def __init__(self, cause: Exception):
        self.cause = cause
        super().__init__(f"the session is unusable since {type(cause).__name__}: {cause}")


class ManifestMismatchError(LlamaCliError):
    """A context is not the one that its manifest describes. `reason` says in what."""

    PREFIX = "manifest mismatch: "

    def __init__(self, reason: str):
        while reason.startswith(self.PREFIX):
            reason = reason.removeprefix(self.PREFIX)
        self.reason = reason
        super().__init__(self.PREFIX + reason)


class UnsupportedFeatureError(LlamaCliError):
    """Something is asked for that is left out on purpose. `feature` names it."""

    def __init__(self, feature: str = ""):
        self.feature = feature
        super().__init__(f"unsupported feature{feature and f': {feature}'}")


class CancelledError(LlamaCliError):
    """The caller asked to stop; nothing of what was being evaluated is kept."""
