"""Architecture features of a graph: MoE, GQA, sliding windows, RoPE variants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from llamacli.graph import Activation, Graph
from llamacli.ops.activations import formula_of
from llamacli.ops.attention import Attention
from llamacli.ops.embed import Embed
from llamacli.ops.gated import Gated
from llamacli.ops.linear import Linear
from llamacli.ops.moe import MoE
from llamacli.ops.rms_norm import RmsNorm
from llamacli.ops.rope import Rotate
from llamacli.ops.softcap import Softcap


def features(graph: Graph) -> list[str]:
    """Describe a graph: experts, attention, positions, output, as short strings."""
    return [*_experts(graph), *_attention(graph), *_positions(graph), *_output(graph)]


def _experts(graph: Graph) -> Iterator[str]:
    mixtures = Counter((op.up.weight.shape[0], op.routing.n_used) for op in graph.ops if isinstance(op, MoE))
    for (n_expert, n_used), _ in mixtures.most_common():
        yield f"{n_expert} experts, {n_used} used"
    if not mixtures:
        yield "dense"
    activations = {op.activation for op in graph.ops if isinstance(op, Gated | MoE)}
    yield from sorted(formula_of(activation).__name__ for activation in activations - {Activation.SWIGLU})
    if len({op.table for op in graph.ops if isinstance(op, Embed)}) > 1:
        yield "per-layer embeddings"


def _attention(graph: Graph) -> Iterator[str]:
    layers = [op for op in graph.ops[graph.n_encoder :] if isinstance(op, Attention) and not op.cross]
    heads = Counter(
        (op.q.width // op.head_dim, graph.states[op.layer].n_head_kv, op.head_dim) for op in layers
    ).most_common()
    for (n_head, n_head_kv, head_dim), _ in heads:
        kind = "MHA" if n_head == n_head_kv else "MQA" if n_head_kv == 1 else "GQA"
        yield f"{kind} {n_head}/{n_head_kv} x {head_dim}"
    windows = Counter(graph.states[op.layer].window for op in layers)
    for window, n in windows.items():
        if window is not None:
            yield f"window {window} in {n} of {len(layers)} layers"
    for chunk, n in Counter(graph.states[op.layer].chunk for op in layers).items():
        if chunk is not None:
            yield f"chunks of {chunk} in {n} of {len(layers)} layers"
    if any(state.values_in_keys for state in graph.states):
        yield "latent attention (MLA)"
    for alibi in sorted({op.alibi for op in layers if op.alibi}):
        yield f"ALiBi up to {alibi:g}"
    if any(op.bias for op in layers):
        yield "relative position bias"
    if graph.n_encoder:
        yield "encoder and decoder"
    if graph.needs_whole_input:
        yield "attention in both directions"
    if len(layers) > len(graph.states):
        yield f"{len(layers) - len(graph.states)} layers share keys and values"
    if any(op.sinks for op in layers):
        yield "attention sinks"
    for cap in sorted({op.softcap for op in layers if op.softcap}):
        yield f"scores capped at {cap:g}"
    normed = {op.out for op in graph.ops if isinstance(op, RmsNorm)}
    if any(op.x in normed for op in graph.ops if isinstance(op, Rotate)):
        yield "normed queries and keys"


def _positions(graph: Graph) -> Iterator[str]:
    rotations = [op for op in graph.ops if isinstance(op, Rotate)]
    for base in sorted({op.rope.base for op in rotations}):
        yield f"RoPE base {base:g}"
    if any(op.rope.n_dims < op.head_dim for op in rotations):
        yield "partial rotary"
    if any(op.rope.ext_factor for op in rotations):
        yield "YaRN"
    elif any(op.rope.freq_scale != 1 for op in rotations):
        yield "positions scaled"
    if any(op.long_factors for op in rotations):
        yield "LongRoPE"
    elif any(op.factors for op in rotations):
        yield "RoPE factors"


def _output(graph: Graph) -> Iterator[str]:
    tables = {op.table for op in graph.ops if isinstance(op, Embed)}
    linears = [op for op in graph.ops if isinstance(op, Linear)]
    if linears and linears[-1].weight in tables:
        yield "tied output"
    for op in graph.ops:
        if isinstance(op, Softcap):
            yield f"logits capped at {op.cap:g}"
