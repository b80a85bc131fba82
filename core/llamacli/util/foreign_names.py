"""Names of parameters in other programs, for errors that name ours.

Parameters have llama.cpp's names here, those of its server and of llama-cpp-python.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Set
from typing import ParamSpec, TypeVar

from llamacli.util.sampling_params import PARAMETERS

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_FOREIGN = {
    "n_probs": "logprobs top_logprobs",
    "stop": "stop_strings stop_sequences stop_words reverse_prompt",
    "max_tokens": "max_new max_new_tokens max_completion_tokens n_predict num_predict",
    "n_ctx": "seq_len num_ctx ctx_size context_size context_length max_seq_len max_model_len",
    "kv_type": "kv_dtype kv_cache_type kv_cache_dtype cache_type type_k type_v cache_type_k cache_type_v",
    "threads": "n_threads num_threads num_thread",
    "seed": "random_seed",
    **{name: " ".join(set(one.names) - {name}) for name, one in PARAMETERS.items()},
}

OURS = {foreign: ours for ours, names in _FOREIGN.items() for foreign in names.split()}
"""Our names by the names of llama.cpp's structures and options, ollama, Hugging Face and vLLM."""

_PLACES = {
    "max_tokens": "it is the argument 'max_tokens' of generate and create_chat",
    "n_ctx": "it is the argument 'n_ctx' of create_session",
    "kv_type": "it is the argument 'kv_type' of create_session",
    "seed": "it is the argument 'seed' of create_session and create_chat",
    "threads": "it is the argument 'threads' of load_model",
    "model_path": "the first argument is the path or the name",
    **dict.fromkeys(("repo_id", "filename"), "the first argument names both, as 'user/repo:Q4_K_M'"),
    "n_gpu_layers": "models run on the CPU",
    "n_batch": "batches are sized automatically",
    "use_mmap": "weights are packed in memory",
    "use_mlock": "weights are packed in memory",
    "logits_processor": "it is an argument of completions; a session takes a SamplerChain",
    "stopping_criteria": "it is an argument of completions; here, leave the loop",
    "response_format": "it is a sampling parameter, SamplingParams(json_schema=...)",
    **{
        name: f"it is a sampling parameter, SamplingParams({name}=...)"
        for name in (*PARAMETERS, "n_probs", "stop", "samplers", "logit_bias", "grammar", "json_schema")
    },
}
"""Where a parameter is given, or why there is none."""

_METHODS = {
    "tokenize": "tokenizer.encode(text)",
    "detokenize": "tokenizer.decode(ids)",
    **dict.fromkeys(("create_embedding", "embed"), "load_embedder(path), then embed(text)"),
    **dict.fromkeys(("eval", "reset", "sample", "save_state", "load_state", "n_tokens"), "create_session()"),
}
"""Ours for methods of llama-cpp-python that a model lacks."""


def explain_names(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator: a TypeError for another program's argument names ours."""
    accepted = frozenset(inspect.signature(function).parameters)
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Arguments.args, **given: Arguments.kwargs) -> Result:
        refuse_foreign(called, given, accepted)
        return function(*args, **given)

    return checked


def missing_method(kind: str, name: str) -> str:
    """Text of an AttributeError; for a method of llama-cpp-python's it names ours."""
    ours = f": here it is {_METHODS[name]}" if name in _METHODS else ""
    return f"{kind!r} object has no attribute {name!r}{ours}"


def refuse_foreign(called: str, given: Iterable[str], accepted: Set[str]) -> None:
    """Raise TypeError for an argument of another program, or of another call."""
    for name in given:
        advice = "" if name in accepted else _advice(name, accepted)
        if advice:
            raise TypeError(f"{called}() has no argument {name!r}: {advice}")


def _advice(name: str, accepted: Set[str]) -> str:
    """Where a parameter is given, "" for names that nobody uses."""
    ours = OURS.get(name, name)
    return f"its name is {ours!r}" if ours in accepted else _PLACES.get(ours, "")
