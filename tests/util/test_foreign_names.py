"""Errors that name our parameter for another program's."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from llamacli import Model, SamplingParams, Session, load_model
from llamacli.chat.completions import completion_arguments
from llamacli.util.foreign_names import OURS, explain_names


@pytest.mark.parametrize(
    ("function", "name", "said"),
    [
        (SamplingParams, "temp", r"SamplingParams\(\) has no argument 'temp': its name is 'temperature'"),
        (SamplingParams, "repetition_penalty", "its name is 'repeat_penalty'"),
        (SamplingParams, "max_tokens", "it is the argument 'max_tokens' of generate and create_chat"),
        (Session.generate, "max_new_tokens", "its name is 'max_tokens'"),
        (Session.generate, "logits_processor", "it is an argument of completions; a session takes a SamplerChain"),
        (Session.generate, "temperature", r"it is a sampling parameter, SamplingParams\(temperature=...\)"),
        (Model.generate, "num_predict", "its name is 'max_tokens'"),
        (Model.create_session, "seq_len", "its name is 'n_ctx'"),
        (Model.create_session, "n_batch", "batches are sized automatically"),
        (Model.create_chat, "max_new", "its name is 'max_tokens'"),
        (Model.create_chat, "top_k", r"it is a sampling parameter, SamplingParams\(top_k=...\)"),
        (load_model, "model_path", "the first argument is the path or the name"),
        (Model.from_pretrained, "repo_id", "the first argument names both, as 'user/repo:Q4_K_M'"),
        (load_model, "n_gpu_layers", "models run on the CPU"),
        (load_model, "num_ctx", "it is the argument 'n_ctx' of create_session"),
    ],
)
def test_errors_name_our_parameter(function: Callable[..., Any], name: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        function(**{name: 1})


def test_errors_name_our_method() -> None:
    with load_model("demo") as model:
        with pytest.raises(AttributeError, match=r"no attribute 'tokenize': here it is tokenizer.encode\(text\)"):
            model.tokenize(b"a")  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
            model.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_errors_of_properties_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "name", property(lambda model: model.metadata.no_such_part))
    with load_model("demo") as model, pytest.raises(AttributeError, match="no_such_part"):
        _ = model.name


def test_unknown_names_are_left_to_python() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        SamplingParams(nonsense=1)  # type: ignore[call-arg]


def test_our_names_are_parameters_somewhere() -> None:
    functions = (load_model, Model.create_session, Session.generate)
    accepted = {name for function in functions for name in inspect.signature(function).parameters}
    assert set(OURS.values()) <= accepted | {field.name for field in attrs.fields(SamplingParams)}
    assert not OURS.keys() & OURS.values()


def test_signature_and_call_are_kept() -> None:
    @explain_names
    def scaled(x: int, /, n_ctx: int = 2, **more: int) -> tuple[int, dict[str, int]]:
        """Product."""
        return x * n_ctx, more

    assert scaled(3, n_ctx=4, other=1) == (12, {"other": 1})
    assert (scaled.__doc__, list(inspect.signature(scaled).parameters)) == ("Product.", ["x", "n_ctx", "more"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_new_tokens", r"Model.create_completion\(\) has no argument 'max_new_tokens': its name is 'max_tokens'"),
        ("n_ctx", "it is the argument 'n_ctx' of create_session"),
        ("temprature", "'temprature'; did you mean 'temperature'?"),
        ("nonsense", "unexpected keyword argument 'nonsense'$"),
    ],
)
def test_completions_name_our_argument(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        completion_arguments(Model.create_completion, {"top_k": 1, name: 1})
