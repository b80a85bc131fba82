"""Exceptions of llamacli and its plugins.

`LlamaCliError` is the base class. Messages name the input at fault (file, metadata key, tensor, flag, token) and what
is allowed. Where Python has a builtin error for the same fault (ValueError, FileNotFoundError, MemoryError), errors are
of that class too. All can be pickled. Errors that only prefix sessions raise are in `llamacli.prefix.errors`.
"""

import contextlib
import errno
import os
import reprlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class LlamaCliError(Exception):
    """Base class of all errors raised by llamacli and its plugins."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception.__reduce__ would call the class with the message, but some constructors take other arguments.
        return _unpickled, (type(self), self.args, dict(self.__dict__))


def _unpickled(kind: type[LlamaCliError], args: tuple[Any, ...], attributes: dict[str, Any]) -> LlamaCliError:
    error = Exception.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class ModelFormatError(LlamaCliError, ValueError):
    """A model file is unreadable, malformed or inconsistent."""


class ModelNotFoundError(ModelFormatError, FileNotFoundError):
    """A model file does not exist.

    `errno`, `strerror` and `filename` are those of a FileNotFoundError.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str = "no such file"):
        FileNotFoundError.__init__(self, errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.filename}: {self.reason}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.filename, self.reason)


class FileChangedError(ModelFormatError):
    """A mapped file was cut or changed while it was in use."""


class TokenizerError(LlamaCliError, ValueError):
    """A tokenizer cannot be built, or cannot encode or decode."""


class ChatTemplateError(LlamaCliError, ValueError):
    """A chat template is missing, broken, or cannot render the conversation."""


class PluginError(LlamaCliError, RuntimeError):
    """A plugin failed, broke the contract, or conflicts with another.

    `line` is the file and line of the plugin's code that caused it, "FILE:LINE", where that is known.
    """

    line: str | None = None


@contextlib.contextmanager
def plugin_errors(part: str) -> Iterator[None]:
    """Convert unexpected exceptions of a plugin to PluginError.

    The message names the `part` of the plugin that failed, and the file and line. A PluginError gets the line only;
    other LlamaCliErrors and MemoryError pass unchanged.
    """
    try:
        yield
    except PluginError as error:
        if error.line is None and (line := line_of(error)):
            error.line = line
            error.args = (f"{error}, at {line}",)
        raise
    except (LlamaCliError, MemoryError):
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = " | ".join(lines[:4]) + (" ... (--debug shows all)" if len(lines) > 4 else "")
        place = line_of(error)
        raised = PluginError(f"{part} failed: {type(error).__name__}: {text}{f', at {place}' if place else ''}")
        raised.line = place
        raise raised from error


_MACHINERY = frozenset({"attr", "contextlib", "functools", "importlib", "pluggy"})
"""Packages that call plugins for the core."""

_CORE = str(Path(__file__).parent) + os.sep


def line_of(error: BaseException) -> str | None:
    """File and line of the plugin's code that raised an error.

    None where it was the core alone. It is the last frame in the package of the first frame outside the core: libraries
    that the plugin calls are left out.
    """
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    outside = [
        (name.partition(".")[0], file, line)
        for name, file, line in frames
        if not file.startswith((_CORE, "<")) and name.partition(".")[0] not in _MACHINERY
    ]
    own = [(file, line) for package, file, line in outside if package == outside[0][0]]
    return f"{own[-1][0]}:{own[-1][1]}" if own else None


def reason_of(error: BaseException) -> str:
    """Type and text of an error, with the plugin's file and line."""
    line = line_of(error)
    return f"{type(error).__name__}: {error}{f', at {line}' if line else ''}"


_NO_MEMORY = (
    "failed to map segment", "annot allocate memory", "can't start new thread", "load shared object file",
    "returned NULL without setting an exception",
)  # fmt: skip
"""Parts of errors about threads, libraries and modules for which there is no memory."""


def lacks_memory(error: BaseException) -> bool:
    """Test for an error that lack of memory has caused.

    Python reports threads, libraries and modules for which there is none by other errors.
    """
    if isinstance(error, MemoryError):
        return True
    kinds = (ImportError, OSError, RuntimeError, SystemError)
    return isinstance(error, kinds) and any(text in str(error) for text in _NO_MEMORY)


class PluginWarning(UserWarning):
    """A plugin failed, and was left out."""


class UnknownArchitectureError(PluginError):
    """No installed plugin supports the model's architecture."""


class InvalidRequestError(LlamaCliError, ValueError):
    """An argument is invalid for the model or session."""


def expect_type(value: object, kinds: type | tuple[type, ...], name: str, wanted: str) -> None:
    """Check the type of an argument; InvalidRequestError names both."""
    if not isinstance(value, kinds):
        raise InvalidRequestError(f"{name} must be {wanted}, not {reprlib.repr(value)} of type {type(value).__name__}")


def expect_path(value: object, name: str) -> None:
    """Check that an argument is a path; InvalidRequestError names it."""
    expect_type(value, (str, os.PathLike), name, "a path")


class MediaError(InvalidRequestError):
    """A picture is unreadable or too large, or the model takes none."""


class GrammarError(InvalidRequestError):
    """A grammar allows no token that was drawn, or exceeds a limit."""


class EmbeddingModelError(InvalidRequestError):
    """The model attends in both directions: it embeds texts and generates none."""


class HubError(LlamaCliError):
    """A model cannot be downloaded, or is not in the cache."""


class ContextOverflowError(LlamaCliError, ValueError):
    """The tokens do not fit into the session's context; nothing was evaluated.

    Attributes: `n_past`, tokens already in the context; `n_tokens`, tokens to add; `n_ctx`, the context's length;
    `stage`, the step that failed ("prefix", "suffix", "decode") or "".
    """

    def __init__(self, n_past: int, n_tokens: int, n_ctx: int, *, stage: str = ""):
        self.n_past, self.n_tokens, self.n_ctx, self.stage = n_past, n_tokens, n_ctx, stage
        super().__init__(
            f"context overflow{stage and f' ({stage})'}: "
            f"{n_past} tokens in the context and {n_tokens} more do not fit into {n_ctx}"
        )


class CacheFull(LlamaCliError):  # noqa: N818 - other libraries use this name
    """A cache has no room and may not evict anything."""


class OutOfMemoryError(LlamaCliError, MemoryError):
    """A KV cache or a model does not fit into memory.

    Nothing was changed.

    Attributes: `asked`, bytes requested; `available`, bytes available.
    """

    def __init__(self, asked: int, available: int, message: str = ""):
        self.asked, self.available = asked, available
        usual = f"out of memory: the KV cache needs {asked} bytes more, and {available} are available"
        super().__init__(message or usual)


class StateError(LlamaCliError, ValueError):
    """A saved state is damaged or incompatible; nothing was restored."""


class ClosedError(LlamaCliError, RuntimeError):
    """A model, session or cache was used after close()."""


class StageError(LlamaCliError, RuntimeError):
    """A pipeline stage is lost, late, wrong, or of another model."""


class SessionBusyError(LlamaCliError, RuntimeError):
    """A session is in another `generate`; nothing was evaluated."""
