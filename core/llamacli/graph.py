"""The graph of a forward pass, with the verbs that record it.

A plugin's `forward` runs once, when a model is loaded, on symbolic values. It records a list of ops, which an engine
compiles and replays for every batch of tokens. Each verb is a module of `llamacli.ops`; those of the core are methods
here, those of a plugin are functions that take the graph first.

Every value is a matrix [n_tokens, width] of float32 whose number of rows is known only when the graph is run.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from typing import NoReturn

from llamacli.errors import InvalidRequestError, PluginError
from llamacli.kv.layout import Held
from llamacli.ops import activations
from llamacli.ops.activations import Activation
from llamacli.ops.add import add
from llamacli.ops.attention import attention
from llamacli.ops.attention_temperature import attention_temperature
from llamacli.ops.axis_positions import axis_positions
from llamacli.ops.base import Op, Recorder, verb_of
from llamacli.ops.batched_linear import batched_linear
from llamacli.ops.block_conv import block_conv
from llamacli.ops.clamp import clamp
from llamacli.ops.class_token import class_token
from llamacli.ops.columns import columns
from llamacli.ops.concat import concat
from llamacli.ops.conv_2d import conv_2d
from llamacli.ops.decoder import Decoder, decoder
from llamacli.ops.deepstack import Deepstack, deepstack
from llamacli.ops.div import div
from llamacli.ops.embed import Embed, embed
from llamacli.ops.gated import gated, geglu, swiglu
from llamacli.ops.grid_positions import grid_positions
from llamacli.ops.layer_norm import LayerNorm, layer_norm
from llamacli.ops.linear import linear
from llamacli.ops.linear_state import linear_state
from llamacli.ops.map import map_
from llamacli.ops.merge_rows import merge_rows
from llamacli.ops.moe import moe
from llamacli.ops.mul import mul
from llamacli.ops.patches import patches
from llamacli.ops.positions import positions
from llamacli.ops.previous_hidden import PreviousHidden, previous_hidden
from llamacli.ops.repeat import repeat
from llamacli.ops.rms_norm import RmsNorm, rms_norm
from llamacli.ops.rope import rope
from llamacli.ops.scale import Scale, scale
from llamacli.ops.select import Selection, select
from llamacli.ops.short_conv import short_conv
from llamacli.ops.sigmoid_gate import sigmoid_gate
from llamacli.ops.softcap import Softcap, softcap
from llamacli.ops.stages import Sent
from llamacli.ops.store import KeyValues, Store, store
from llamacli.ops.values import Param, Tensor, Value
from llamacli.ops.xielu import xielu

__all__ = ["Activation", "Graph", "KeyValues", "Op", "Param", "Selection", "Tensor", "Value"]


class UnknownVerbError(PluginError, AttributeError):
    """A forward pass used a verb that the graph does not have."""


class Graph(Recorder):
    """Graph of a forward pass: its ops in order.

    `states` are the shapes of the keys and values that each `store` caches, `recurrent` those of the recurrent states.
    `n_batch` is the largest number of rows of a batch, by default `N_BATCH`; a media encoder gets a picture at once.
    """

    n_batch: int | None = None
    cached: Sequence[KeyValues] = ()
    """Keys and values that the layers of a draft head's model read, see `CacheHeadArchitecture`."""
    held: Held | None = None
    """Layers and states of a pipeline stage, None for all."""

    add = add
    attention = attention
    attention_temperature = attention_temperature
    batched_linear = batched_linear
    block_conv = block_conv
    clamp = clamp
    columns = columns
    concat = concat
    conv_2d = conv_2d
    decoder = decoder
    deepstack = deepstack
    div = div
    embed = embed
    gated = gated
    geglu = geglu
    axis_positions = axis_positions
    class_token = class_token
    grid_positions = grid_positions
    layer_norm = layer_norm
    linear = linear
    linear_state = linear_state
    map = map_
    merge_rows = merge_rows
    moe = moe
    mul = mul
    patches = patches
    positions = positions
    previous_hidden = previous_hidden
    repeat = repeat
    rms_norm = rms_norm
    rope = rope
    scale = scale
    select = select
    short_conv = short_conv
    sigmoid_gate = sigmoid_gate
    softcap = softcap
    store = store
    swiglu = swiglu
    xielu = xielu

    def __getattr__(self, name: str) -> NoReturn:
        """Raise UnknownVerbError, which lists the verbs."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownVerbError(_unknown_verb(name))

    @property
    def tail(self) -> int:
        """Index of the first op after all that mix tokens.

        From there on a token's row depends on no others.
        """
        return max((i for i, op in enumerate(self.ops, start=1) if op.mixes_tokens), default=0)

    @property
    def max_positions(self) -> int | None:
        """Longest context that the ops can compute, None for any."""
        return min((n for op in self.ops if (n := op.max_positions()) is not None), default=None)

    @property
    def needs_whole_input(self) -> bool:
        """True if a token's result depends on tokens behind it.

        Sessions, which evaluate token by token, cannot run such a graph.
        """
        return any(op.needs_whole_input for op in self.ops[self.n_encoder :])

    @property
    def n_encoder(self) -> int:
        """Number of the first ops that are the encoder's, 0 without one."""
        return next((i for i, op in enumerate(self.ops, start=1) if isinstance(op, Decoder)), 0)

    @property
    def sent_by_encoder(self) -> Value | None:
        """Value that an encoder's part in a pipeline stage ends with."""
        last = self.ops[self.n_encoder - 2] if self.n_encoder > 1 else None
        return last.out if isinstance(last, Sent) else None

    @property
    def n_components(self) -> int:
        """Position components of a token: 1, or 4 for M-RoPE."""
        return max((op.n_components for op in self.ops), default=1)

    @property
    def n_merged(self) -> int:
        """Rows of the inputs that become one row of the result."""
        return max((op.n_merged for op in self.ops), default=1)

    @property
    def uses_distance(self) -> bool:
        """True if distances of cells count: ALiBi, sliding windows, chunks."""
        return any(op.uses_distance for op in self.ops) or any(s.window or s.chunk for s in self.states)

    @property
    def embedding(self) -> Embed | None:
        """Lookup of the tokens' embeddings, whose rows inputs may give."""
        return next((op for op in self.ops if isinstance(op, Embed) and op.placeholder is None), None)

    @property
    def embedding_width(self) -> int:
        """Width of embeddings given as inputs, 0 without a lookup."""
        n_parts = 1 + max((op.part for op in self.ops if isinstance(op, Deepstack)), default=0)
        return n_parts * self.embedding.out.width if self.embedding else 0

    @property
    def reads_hidden(self) -> bool:
        """True if it reads hidden states of another graph.

        Draft heads do.
        """
        return self.n_hidden > 0

    @property
    def n_hidden(self) -> int:
        """Numbers of a token that it reads of another graph."""
        return max((op.out.width for op in self.ops if isinstance(op, PreviousHidden)), default=0)

    def exact_tensors(self) -> set[str]:
        """Names of the tensors that no mode may round.

        Rounding a router would change which experts are chosen.
        """
        makers, names = {op.out: op for op in self.ops}, set[str]()
        pending = [value for op in self.ops for value in op.exact_inputs()]
        while pending:
            op = makers[pending.pop()]
            names |= {tensor.name for tensor in op.matrices()}
            pending += [] if op.matrices() else op.inputs()  # through a scale, or a sum, to the products
        return names

    def unread(self) -> list[str]:
        """Describe the ops whose results no op reads, the last one excepted.

        Such as keys and values that are stored and never attended to: parts of the forward pass that were forgotten.
        """
        read = {value for op in self.ops for value in op.inputs()}
        attended = {getattr(op, "layer", None) for op in self.ops if not isinstance(op, Store)}
        return [
            f"{verb_of(op)} (op {number} of {len(self.ops)}, width {op.out.width})"
            for number, op in enumerate(self.ops[:-1], start=1)
            if (op.layer not in attended if isinstance(op, Store) else op.out.width > 0 and op.out not in read)
        ]

    def with_ops(self, ops: list[Op]) -> Graph:
        """Graph of other ops with the same caches."""
        graph = Graph()
        graph.states, graph.recurrent, graph.ops = self.states, self.recurrent, ops
        graph.n_batch, graph.held, graph.passed = self.n_batch, self.held, self.passed
        return graph

    def with_layer_inputs(self, layers: Sequence[int]) -> Graph:
        """Graph that passes its hidden states and the inputs of layers.

        They are side by side. The input of a layer is what its first norm, `blk.{i}.attn_norm`, reads; that of the
        layer behind the last one what the norm of the output reads. Raises InvalidRequestError if a layer has no such
        norm.
        """
        hidden, norms = self.hidden, [op for op in self.ops if isinstance(op, RmsNorm | LayerNorm) and op.weight]
        read = {op.tensors()[0].name: op.x for op in norms}
        n_layer = 1 + max((int(name.split(".")[1]) for name in read if name.startswith("blk.")), default=-1)
        names = [f"blk.{i}.attn_norm.weight" if i < n_layer else "output_norm.weight" for i in layers]
        if hidden is None or max(layers) > n_layer or not read.keys() >= {*names}:
            raise InvalidRequestError(f"the forward pass does not have all of layers {', '.join(map(str, layers))}")
        at = 1 + [op.out for op in self.ops].index(hidden)
        graph = self.with_ops(self.ops[:at])
        graph.passed = functools.reduce(graph.concat, (read[name] for name in names), hidden)
        graph.ops += self.ops[at:]
        return graph

    @property
    def hidden(self) -> Value | None:
        """Value that the output layer, the last matrix product, reads.

        None if no matrix product computes the logits. That of an encoder, which has none, is its result.
        """
        table, op, makers = self.embedding, self.ops[-1], {op.out: op for op in self.ops}
        while isinstance(op, Scale | Softcap):
            op = makers[op.inputs()[0]]
        has_logits = bool(op.matrices()) and table is not None and op.out.width == table.table.shape[0]
        if self.needs_whole_input and not has_logits:
            return self.ops[-1].out
        while not op.matrices() and op.inputs():
            op = makers[op.inputs()[0]]
        return op.inputs()[0] if op.matrices() and op.inputs() else None

    def without_output(self) -> Graph:
        """Graph without the output layer, the last matrix product.

        Its last op computes the value that the output layer reads.
        """
        hidden = self.hidden
        if hidden is None:
            raise PluginError("the forward pass has no output layer: no matrix product computes its logits")
        return self.with_ops(self.ops[: [op.out for op in self.ops].index(hidden) + 1])


def verbs() -> list[str]:
    """Names of the verbs: methods of a graph defined in `llamacli.ops`."""
    return sorted(
        name
        for name, method in vars(Graph).items()
        if getattr(method, "__module__", "").startswith("llamacli.ops.") and not name.startswith("_")
    )


def _unknown_verb(name: str) -> str:
    if callable(getattr(activations, name, None)):
        return f"unknown verb g.{name}: it is a function, g.map(x, {name}), from llamacli.plugin"
    similar = difflib.get_close_matches(name, verbs(), 1, 0.5)
    hint = f"; did you mean g.{similar[0]}?" if similar else ""
    return (
        f"unknown verb g.{name}{hint}; the graph has {', '.join(verbs())}; docs/plugins.md shows how to write another"
    )
