"""Models without weights: tokenizer, templates and metadata for the ingress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamacli.engine import Program, Prompts, QuantMode
from llamacli.engine.base import Timings
from llamacli.errors import InvalidRequestError
from llamacli.graph import Graph
from llamacli.kv.layout import KVSpec, RecurrentSpec
from llamacli.loaders import ModelFile
from llamacli.model import Model, load_model


class UnweightedProgram:
    """Program that knows a graph's shapes and computes nothing."""

    has_hidden, is_whole = False, True
    prompts = Prompts.REGISTERS

    def __init__(self, graph: Graph):
        self.graph = graph
        self.states: Sequence[KVSpec] = graph.states
        self.recurrent: Sequence[RecurrentSpec] = graph.recurrent
        self.max_positions, self.needs_whole_input = graph.max_positions, graph.needs_whole_input
        self.has_encoder = graph.n_encoder > 0
        self.timings = Timings()

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise InvalidRequestError."""
        raise InvalidRequestError("this model was loaded without weights: it has a tokenizer and templates only")

    load = recompiled = extended = forward_with_hidden = forward_in_pieces = shift_keys = forward

    def rope_variant(self, seq_len: int) -> int:
        """The same for all lengths: nothing is computed."""
        return 0


class UnweightedEngine:
    """Engine that reads no weights."""

    def compile(self, graph: Graph, file: ModelFile, mode: QuantMode) -> Program:
        return UnweightedProgram(graph)


def load_unweighted(
    path: Path, mode: str, overrides: Mapping[str, Any] | None = None, mmproj: Path | None = None
) -> Model:
    """Load a model without its weights; raises what `load_model` raises.

    So is its media encoder, which cuts pictures and sound into tiles, and encodes none.
    """
    return load_model(path, mode, engine=UnweightedEngine(), overrides=overrides, mmproj=mmproj)


def context_length(model: Model, n_ctx: int | None) -> int:
    """Tokens of a context: those asked for, else the model's own.

    All replicas need the same, so it does not depend on a node's memory. Raises InvalidRequestError for more tokens
    than the model has positions.
    """
    return model.context_size(n_ctx or min(model.config.n_ctx, model.program.max_positions or model.config.n_ctx))
