"""Grammars that requests ask for, and their compiled sampler chains."""

from __future__ import annotations

import json
import re
import weakref
from typing import Any

import msgspec
import numpy as np

from llamacli.chat import openai
from llamacli.chat.openai import FORMATS
from llamacli.chat.rules import literal
from llamacli.errors import InvalidRequestError
from llamacli.model import Model
from llamacli.sampling import SamplerChain, SamplerState, SamplingParams, build_chain
from llamacli.sampling.grammar import memory_limit
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.errors import bad_request
from llamacli.serve.http.schemas.common import MAX_SCHEMA, Generation, StructuredOutputs

MAX_KEPT_BYTES = 512 << 20
"""Memory that the kept grammars of a model may take, if each takes all that it may."""

_chains: weakref.WeakKeyDictionary[Model, dict[SamplingParams, SamplerChain]] = weakref.WeakKeyDictionary()


def schema_of(request: Generation) -> tuple[dict[str, Any] | bool | None, str | None]:
    """JSON Schema and grammar that a request asks for.

    At most one of them. Raises BadRequestError, FieldError.
    """
    wanted = constraints_of(request)
    shape = None if request.response_format is None else msgspec.to_builtins(request.response_format)
    if len(wanted) > 1 and (shape is None or shape["type"] in FORMATS):
        raise BadRequestError(f"{', '.join(wanted)}: they exclude each other", next(iter(wanted)))
    schema, grammar = openai.schema_of(shape), None
    for name, value in wanted.items():
        match name.removeprefix("guided_").removeprefix("structured_outputs."):
            case "json_schema" | "json":
                schema = openai.checked_schema(value if name == "json_schema" else _parsed(value), name)
            case "json_object":
                schema = {"type": "object"}
            case "grammar":
                grammar = value
            case "regex":
                escaped = _SLASH.sub(lambda found: found[1] or r"\/", value)
                grammar = f"{_LARK}/{escaped}/"
            case "choice":
                grammar = _LARK + " | ".join(map(literal, value))
    size = len(grammar.encode()) if grammar is not None else len(json.dumps(schema)) if schema is not None else 0
    check_size(size)
    return schema, grammar


def constraints_of(request: Generation) -> dict[str, Any]:
    """Constraints that a request gives, by their fields.

    An empty `grammar` is none, as for llama-server.
    """
    given, asked = request.structured_outputs or StructuredOutputs(), request.response_format
    fields = {
        "response_format": None if asked is None or asked.type == "text" else asked,
        "json_schema": request.json_schema,
        "grammar": request.grammar or None,
        **{f"guided_{name}": getattr(request, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")},
        **{f"structured_outputs.{name}": value for name, value in msgspec.structs.asdict(given).items()},
    }
    if not given.json_object:
        del fields["structured_outputs.json_object"]
    return {name: value for name, value in fields.items() if value is not None}


_LARK = "%llguidance {}\nstart: "
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def _parsed(schema: Any) -> Any:
    """Schema, which may be given as text."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        return schema  # and refused


def check_size(n_bytes: int, param: str | None = None) -> None:
    """Refuse a grammar, or schemas, of more than MAX_SCHEMA bytes. Raises BadRequestError."""
    if n_bytes > MAX_SCHEMA:
        raise BadRequestError(f"the schema has {n_bytes} bytes; {MAX_SCHEMA} are allowed", param, "invalid_schema")


def chain(model: Model, params: SamplingParams) -> SamplerChain:
    """Sampler chain of parameters with a grammar, which takes time to compile.

    Those used last are kept with the model, up to MAX_KEPT_BYTES. Raises BadRequestError, also for a grammar that
    allows no beginning of a text, such as one that refers to itself without an end.
    """
    kept = _chains.setdefault(model, {})
    found = kept.pop(params, None)
    if found is None:
        try:
            found = build_chain(params, model.tokenizer, model.find_sampler)
        except InvalidRequestError as error:
            if str(error).startswith(("grammar", "json_schema")):
                raise BadRequestError(str(error), None, "invalid_schema") from None
            raise bad_request(error) from None
        try:
            SamplerState(0, model.tokenizer).legal(np.zeros(model.tokenizer.n_vocab, np.float32), found)
        except InvalidRequestError as error:
            reason = f"the grammar or schema allows no text: {error}"
            raise BadRequestError(reason, None, "invalid_schema") from None
    _keep(kept, params, found)
    return found


def _keep(kept: dict[SamplingParams, SamplerChain], params: SamplingParams, found: SamplerChain) -> None:
    kept[params] = found
    left = MAX_KEPT_BYTES
    for each in reversed(list(kept)):
        left -= memory_limit(each.grammar or each.json_schema or "")
        if left < 0 and each is not params:
            kept.pop(each, None)
