"""Errors: builtin base classes, pickling, attributes."""

import copy
import errno
import pickle
from pathlib import Path

import pytest

import llamacli
import llamacli.prefix.errors
from llamacli import errors, load_model

MADE = [
    errors.ContextOverflowError(3, 5, 7, stage="prefix"),
    errors.OutOfMemoryError(10, 2),
    errors.ModelNotFoundError("absent.gguf"),
    errors.SessionBusyError("busy"),
    llamacli.prefix.errors.ManifestMismatchError("length"),
    llamacli.prefix.errors.SessionFatalError(ValueError("seed")),
]
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.LlamaCliError) and "__init__" not in vars(kind)
]


@pytest.mark.parametrize(
    "error", [*MADE, *(kind("a message") for kind in KINDS)], ids=lambda error: type(error).__name__
)
def test_pickling_keeps_message_and_attributes(error: errors.LlamaCliError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert (str(again), again.args) == (str(error), error.args)
        assert repr(vars(again)) == repr(vars(error))


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ModelNotFoundError, FileNotFoundError),
        (errors.ModelNotFoundError, errors.ModelFormatError),
        (errors.ModelFormatError, ValueError),
        (errors.InvalidRequestError, ValueError),
        (errors.ContextOverflowError, ValueError),
        (errors.ChatTemplateError, ValueError),
        (errors.TokenizerError, ValueError),
        (errors.StateError, ValueError),
        (errors.OutOfMemoryError, MemoryError),
        (errors.ClosedError, RuntimeError),
        (errors.SessionBusyError, RuntimeError),
        (errors.PluginError, RuntimeError),
    ],
)
def test_errors_are_builtin_ones_too(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.LlamaCliError)


def test_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    path = tmp_path / "absent.gguf"
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf: no such file") as caught:
        load_model(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(path))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    assert str(errors.ModelNotFoundError(tmp_path)) == f"{tmp_path}: no such file"
