"""Model family interface of plugins: configuration, tensors, forward pass."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import attrs
import numpy as np

from llamacli.errors import InvalidRequestError, ModelFormatError, PluginError
from llamacli.gguf import Metadata
from llamacli.graph import Graph, KeyValues, Param, Value
from llamacli.ops.attention import Attention
from llamacli.tensor_table import TensorTable, Weights
from llamacli.util.numbers import is_integer
from llamacli.util.settings import MAX_CONTEXT

if TYPE_CHECKING:
    from llamacli.loaders import ModelFile


def checked_n_ctx(value: int) -> int:
    """Check the length of a context, 1 to MAX_CONTEXT; InvalidRequestError for others."""
    if not is_integer(value) or not 0 < value <= MAX_CONTEXT:
        raise InvalidRequestError(f"n_ctx must be an integer from 1 to {MAX_CONTEXT}, not {value!r}")
    return int(value)


def _freeze(_: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Freeze fields without a setter of their own, in subclasses too."""
    fixed = attrs.setters.frozen
    return [field.evolve(on_setattr=fixed) if field.on_setattr is None else field for field in fields]


@attrs.define(kw_only=True, field_transformer=_freeze)
class Config:
    """Hyperparameters that all decoders share, named as in GGUF.

    A family's own ones are added by subclassing. `n_ctx`, the length of the context in tokens, may be lowered before
    a session is created; it starts as `context_length`, the length that the model was trained for. Everything else is
    fixed. `decoder_start` is the token with which the decoder begins in models with an encoder. `labels` are the
    classes of a classifier head, empty without names; `classifier_pooling` is llama.cpp's number of the pooling before
    it, 0 for the token whose state depends on all others.
    """

    architecture: str
    n_vocab: int
    context_length: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    rms_eps: float = 0.0
    layer_norm_eps: float = 0.0
    n_expert: int = 0
    n_expert_used: int = 0
    decoder_start: int | None = None
    labels: list[str] = attrs.field(factory=list)
    classifier_pooling: int = 0
    n_ctx: int = attrs.field(
        default=attrs.Factory(lambda self: self.context_length, takes_self=True),
        on_setattr=lambda self, field, value: checked_n_ctx(value),
    )

    @classmethod
    def from_gguf(cls, metadata: Metadata, **family: Any) -> Self:
        """Read the common keys of a GGUF file.

        `family` are the fields that a subclass adds, and common fields that it has read itself, because its files
        write them in another way. A file must have the epsilon of RMS norm unless the family gives `rms_eps` or
        `layer_norm_eps`.

        Raises ModelFormatError naming the key that is missing, of a wrong type or out of range.
        """
        architecture = metadata.get_str("general.architecture")

        def count(field: str, key: str, maximum: int, minimum: int = 1, **default: int) -> int:
            if field in family:
                return int(family[field])
            return metadata.get_int(f"{architecture}.{key}", minimum=minimum, maximum=maximum, **default)

        n_embd = count("n_embd", "embedding_length", 1 << 20)
        n_head = count("n_head", "attention.head_count", 1 << 14)
        n_head_kv = count("n_head_kv", "attention.head_count_kv", 1 << 14, default=n_head)
        if n_head % n_head_kv:
            raise ModelFormatError(
                f"{metadata.source}: {architecture}.attention.head_count = {n_head} is not a multiple of "
                f"{architecture}.attention.head_count_kv = {n_head_kv}"
            )
        if "head_dim" not in family and n_embd % n_head and f"{architecture}.attention.key_length" not in metadata:
            raise ModelFormatError(
                f"{metadata.source}: {architecture}.embedding_length = {n_embd} is not a multiple of "
                f"{architecture}.attention.head_count = {n_head}, and {architecture}.attention.key_length is missing"
            )
        head_dim = count("head_dim", "attention.key_length", 1 << 14, default=max(1, n_embd // n_head))
        value_dim = count("head_dim", "attention.value_length", 1 << 14, default=head_dim)
        if value_dim != head_dim:
            raise ModelFormatError(
                f"{metadata.source}: {architecture}.attention.value_length = {value_dim} differs from "
                f"{architecture}.attention.key_length = {head_dim}; this is not supported"
            )
        n_expert = count("n_expert", "expert_count", 1 << 14, minimum=0, default=0)
        n_expert_used = count("n_expert_used", "expert_used_count", 1 << 14, minimum=0, default=0)
        if n_expert_used > n_expert or (n_expert > 0) != (n_expert_used > 0):
            raise ModelFormatError(
                f"{metadata.source}: {architecture}.expert_used_count = {n_expert_used} does not fit "
                f"{architecture}.expert_count = {n_expert}"
            )
        common: dict[str, Any] = {
            "architecture": architecture,
            "n_vocab": _n_vocab(metadata, architecture),
            "context_length": count("context_length", "context_length", MAX_CONTEXT),
            "n_embd": n_embd,
            "n_layer": count("n_layer", "block_count", 1 << 10),
            "n_head": n_head,
            "n_head_kv": n_head_kv,
            "head_dim": head_dim,
            "n_ff": count("n_ff", "feed_forward_length", 1 << 24),
            "n_expert": n_expert,
            "n_expert_used": n_expert_used,
            "labels": _labels(metadata, architecture),
            "classifier_pooling": count("classifier_pooling", "classifier.pooling_type", 4, minimum=0, default=0),
        }
        if not family.keys() & {"rms_eps", "layer_norm_eps"}:
            common["rms_eps"] = metadata.get_float(
                f"{architecture}.attention.layer_norm_rms_epsilon", minimum=0.0, maximum=1.0
            )
        return cls(**common | family)


def _n_vocab(metadata: Metadata, architecture: str) -> int:
    """Size of the vocabulary; `vocab_size` counts only in files without one."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if isinstance(tokens, Sequence) else None
    default = {} if n_tokens is None else {"default": n_tokens}
    stated = metadata.get_int(f"{architecture}.vocab_size", minimum=1, maximum=1 << 31, **default)
    return stated if n_tokens is None else n_tokens


def _labels(metadata: Metadata, architecture: str) -> list[str]:
    key = f"{architecture}.classifier.output_labels"
    labels = metadata.get(key, [])
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise ModelFormatError(f"{metadata.source}: metadata key {key!r} is not an array of strings")
    return [*labels]


def sliding_layers(metadata: Metadata, architecture: str, n_layer: int, period: int) -> tuple[bool, ...]:
    """Layers with sliding-window attention, one boolean a layer.

    The key holds a boolean for each layer, or a period whose last layer attends to everything. `period` is taken
    for files that say neither; 0 lets all layers slide. Raises ModelFormatError naming the key.
    """
    key = f"{architecture}.attention.sliding_window_pattern"
    if isinstance(metadata.get(key), np.ndarray):
        return metadata.get_bools(key, n_layer)
    period = metadata.get_int(key, default=period, minimum=0)
    return tuple(not period or i % period < period - 1 for i in range(n_layer))


class Architecture(abc.ABC):
    """Model family, registered under its `general.architecture`."""

    name: str
    """The exact `general.architecture` string."""

    @abc.abstractmethod
    def configure(self, metadata: Metadata) -> Any:
        """Read the hyperparameters, a Config. Raises ModelFormatError naming the key at fault."""

    @abc.abstractmethod
    def tensors(self, config: Any) -> TensorTable:
        """Table of the tensors that a file with this configuration has."""

    @abc.abstractmethod
    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Record the forward pass: token ids in, logits out.

        `g.embed` reads the token ids; the result has width `config.n_vocab`. Embedding models, which attend in both
        directions, have no logits: their result are the hidden states.
        """

    def nextn(self, g: Graph, config: Any, weights: Weights) -> Value | None:
        """Record the multi-token-prediction head (MTP, NextN).

        It computes the logits of the token after the next: block i of `weights.nextn` reads the embedding of a token
        and the hidden state of the token before, `g.previous_hidden`. `llamacli.blocks.nextn` has the parts. None, the
        default, is a family without such heads.
        """
        return None

    classifier_softmax: bool = False
    """True if the scores of classes are the softmax of the classifier head's outputs."""

    def classifier(self, g: Graph, config: Any, weights: Weights) -> Value | None:
        """Record the classifier head of rerankers: scores of `config.labels`.

        `g.previous_hidden(config.n_embd)` is the pooled hidden state of a text; without labels there is one score.
        `llamacli.blocks.classifier` has the head of llama.cpp's encoders. None, the default, is a file without a head.
        """
        return None

    def dense(self, g: Graph, config: Any, weights: Weights) -> Value | None:
        """Record the dense layers of a decoder's embeddings.

        They map `g.previous_hidden(config.n_embd)`, the hidden state of a token. None, the default, is a file without.
        """
        return None

    def strips_after(self, metadata: Metadata, special: str) -> bool:
        """True if encoding strips white space after a special token (`rstrip`).

        `special` is the text of the token; GGUF files have no key for this.
        """
        return False

    def strips_before(self, metadata: Metadata, special: str) -> bool:
        """True if encoding strips white space before a special token (`lstrip`).

        `special` is the text of the token; GGUF files have no key for this.
        """
        return False


class HeadArchitecture(Architecture):
    """Family of draft heads with files of their own, such as EAGLE-3.

    They read the hidden states of another model.

    `forward` computes the logits of the token after the next from the embedding of a token and the state of the token
    before, `g.previous_hidden(config.n_embd)`, and sets `g.passed` to the state that the next drafted token reads.
    `token_embd` and `output` are the model's where a file has none.
    """

    def of_shapes(self, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Configuration with the number of tokens that a head predicts, its `n_draft`.

        It is that of `d2t`, or all.
        """
        return attrs.evolve(config, n_draft=shapes.get("d2t", (config.n_vocab,))[0])

    def layers(self, config: Any) -> tuple[int, ...]:
        """Layers of the model whose inputs the head reads, its `layers`.

        That behind the last one has the number of layers.
        """
        found: tuple[int, ...] = config.layers
        return found

    @abc.abstractmethod
    def fuse(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Record the state of a token, of width `config.n_embd`.

        `g.previous_hidden` are the inputs of `layers` at this token, side by side.
        """

    def ids(self, weights: Weights) -> Param | None:
        """Ids of the head's tokens in the model's vocabulary, `d2t`.

        None where they are the same.
        """
        found: Param | None = weights.d2t
        return found


class BlockHeadArchitecture(HeadArchitecture):
    """Family of draft heads that predict blocks of tokens, such as DFlash.

    `fuse` makes states as those of other heads do; `inject` caches keys and values of them. `forward` computes logits
    of a block, the last token and masks behind it, which attends to the same cells and, unless it is causal, to itself
    in both directions: row i is of the token at its own place.
    """

    @abc.abstractmethod
    def inject(self, g: Graph, config: Any, weights: Weights) -> None:
        """Record the caching of keys and values of a token's state.

        The state is `g.previous_hidden(config.n_embd)`, and each `g.store` as in `forward`.
        """

    def block(self, config: Any) -> tuple[int, int, bool, int]:
        """Length, id of masks, True if causal, and the first predicting row."""
        found: tuple[int, int, bool, int] = config.block
        return found

    def bias(self, g: Graph, config: Any, weights: Weights) -> Value | None:
        """Record what a token adds to the next one's logits.

        It is as wide as the logits, of the token's id and, as `g.previous_hidden(config.n_embd)`, of what the output
        layer reads at the next one's place. None, the default, adds nothing.
        """
        return None

    def n_candidates(self, config: Any) -> int | None:
        """Number of most probable tokens that `bias` chooses from, None for all."""
        return None


class CacheHeadArchitecture(HeadArchitecture):
    """Family of draft heads that read the model's KV cache.

    They store nothing. `forward` computes the logits of a token from the embedding of the one before,
    `weights.model_embd`, and a hidden state, `g.previous_hidden`: that of the model at the token before that one, and
    from the second drafted token on the head's own, `g.passed`, as wide as the model's. `g.cached` are the keys and
    values that the model's layers read, in their order; all drafted tokens see the cells that the model has computed.
    A window of `g.cached` has one token less than the model's, which the drafted token takes.
    """

    def of_shapes(self, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Configuration as it is: a head predicts all tokens."""
        return config

    def layers(self, config: Any) -> tuple[int, ...]:
        """No layers: it reads the model's hidden states."""
        return ()

    def ids(self, weights: Weights) -> Param | None:
        """None: tokens are the model's."""
        return None

    def fuse(self, g: Graph, config: Any, weights: Weights) -> Value:
        """The hidden state itself, of width `config.n_model`."""
        return g.previous_hidden(config.n_model)


def trace(architecture: Architecture, config: Any, weights: Weights) -> Graph:
    """Record the forward pass of a model.

    The last op computes the logits; in a graph that needs its whole input, or without a vocabulary, hidden states.
    """
    graph = Graph()
    logits: object = architecture.forward(graph, config, weights)
    if not isinstance(logits, Value):
        found = "None: is `return` missing?" if logits is None else f"{type(logits).__name__}, expected one value"
        raise PluginError(f"forward of {architecture.name!r} returned {found}")
    if graph.ops and graph.ops[-1].out is logits and (graph.needs_whole_input or not isinstance(config, Config)):
        return graph
    if not graph.ops or graph.ops[-1].out is not logits or logits.width != config.n_vocab:
        raise PluginError(
            f"forward of {architecture.name!r} must end in the op that computes its logits, {config.n_vocab} wide"
        )
    if unread := graph.unread():
        raise PluginError(f"forward of {architecture.name!r} computes what nothing reads: {', '.join(unread)}")
    encoder, decoder = graph.ops[: graph.n_encoder], graph.ops[graph.n_encoder :]
    if {op.out for op in encoder} & {value for op in decoder for value in op.inputs()}:
        raise PluginError(f"forward of {architecture.name!r}: the decoder reads a value of the encoder, not its store")
    if encoder and (graph.recurrent or config.decoder_start is None):
        raise PluginError(f"forward of {architecture.name!r}: an encoder needs decoder_start, and no recurrent state")
    return graph


def trace_nextn(architecture: Architecture, config: Config, weights: Weights) -> Graph | None:
    """Record the multi-token-prediction head of a model, None without one.

    Raises PluginError for one that cannot draft: it must read `g.previous_hidden`, end in an output layer, and have no
    recurrent state, which cannot be rewound.
    """
    graph = Graph()
    logits = architecture.nextn(graph, config, weights) if weights.nextn else None
    if logits is None:
        return None
    part = f"nextn of {architecture.name!r}"
    if graph.ops[-1].out is not logits or logits.width != config.n_vocab:
        raise PluginError(f"{part} must end in the op that computes its logits, {config.n_vocab} wide")
    if not graph.reads_hidden or graph.recurrent or graph.needs_whole_input:
        raise PluginError(f"{part} must read g.previous_hidden, and have neither recurrent states nor an encoder")
    if graph.hidden is None or graph.hidden.width != config.n_embd:
        raise PluginError(f"{part} must have an output layer that reads {config.n_embd} numbers a token")
    if unread := graph.unread():
        raise PluginError(f"{part} computes what nothing reads: {', '.join(unread)}")
    return graph


def trace_head(architecture: HeadArchitecture, config: Config, weights: Weights) -> tuple[Graph, Graph]:
    """Record the two parts of a draft head: `fuse` and `forward`.

    Raises PluginError for parts that cannot draft, see `HeadArchitecture`.
    """
    part, fuser, head = f"draft head {architecture.name!r}", Graph(), Graph()
    state, logits = architecture.fuse(fuser, config, weights), architecture.forward(head, config, weights)
    for graph, out, end in ((fuser, state, "the state of a token"), (head, logits, "its logits")):
        if not graph.reads_hidden or graph.recurrent or graph.needs_whole_input or graph.ops[-1].out is not out:
            raise PluginError(f"{part} must read g.previous_hidden, end in {end}, and have no recurrent states")
    passed = head.passed
    if state.width != config.n_embd or passed is None or passed.width != config.n_embd or head.hidden is None:
        raise PluginError(f"{part} must set g.passed to a state of {config.n_embd} numbers, as `fuse` makes them")
    return fuser, head


def trace_block_head(
    architecture: BlockHeadArchitecture, config: Config, weights: Weights
) -> tuple[Graph, Graph, Graph, Graph | None]:
    """Record the parts of a head that predicts blocks.

    They are `fuse`, `inject`, `forward` and `bias`.

    Raises PluginError for parts that cannot draft, see `BlockHeadArchitecture`.
    """
    part, fuser, injector, head, biases = f"draft head {architecture.name!r}", Graph(), Graph(), Graph(), Graph()
    state, logits = architecture.fuse(fuser, config, weights), architecture.forward(head, config, weights)
    bias = architecture.bias(biases, config, weights)
    architecture.inject(injector, config, weights)
    if not fuser.reads_hidden or fuser.states or fuser.ops[-1].out is not state or state.width != config.n_embd:
        raise PluginError(f"{part}: fuse must make a state of {config.n_embd} numbers of g.previous_hidden")
    if not injector.reads_hidden or injector.states != head.states or injector.recurrent:
        raise PluginError(f"{part}: inject must read g.previous_hidden, and store what forward does")
    injector.scale(injector.ops[0].out, 1.0)  # a program ends in a value, which nothing reads
    if head.ops[-1].out is not logits or head.reads_hidden or head.recurrent:
        raise PluginError(f"{part}: forward must end in its logits, and have no recurrent states")
    if bias and (biases.states or biases.ops[-1].out is not bias or bias.width != logits.width):
        raise PluginError(f"{part}: bias must be as wide as the logits, and store nothing")
    return fuser, injector, head, biases if bias else None


def trace_cache_head(
    architecture: CacheHeadArchitecture, config: Config, weights: Weights, model: Graph
) -> tuple[Graph, Graph]:
    """Record `fuse` and `forward` of a head that reads a cache.

    `model` is the graph whose cache it is.

    Raises PluginError for one that cannot draft, see `CacheHeadArchitecture`.
    """
    part, fuser, head = f"draft head {architecture.name!r}", Graph(), Graph()
    architecture.fuse(fuser, config, weights)
    if model.embedding:
        weights.share("model_embd", Param(model.embedding.table))
    head.states = [attrs.evolve(state, window=state.window and state.window - 1) for state in model.states]
    head.cached = [KeyValues(op.layer, head.states[op.layer]) for op in model.ops if isinstance(op, Attention)]
    logits, n = architecture.forward(head, config, weights), len(model.states)
    if head.n_hidden != fuser.n_hidden or head.ops[-1].out is not logits or head.recurrent or len(head.states) != n:
        raise PluginError(f"{part} must read g.previous_hidden as fuse does, end in its logits, and store nothing")
    if head.passed is None or head.passed.width != head.n_hidden or head.hidden is None:
        raise PluginError(f"{part} must set g.passed to a state of {head.n_hidden} numbers")
    return fuser, head


def trace_classifier(architecture: Architecture, config: Config, weights: Weights) -> Graph | None:
    """Record the classifier head of a model, None without one.

    Raises PluginError for one that does not compute a score of each class from `g.previous_hidden`.
    """
    graph = Graph()
    scores = architecture.classifier(graph, config, weights)
    n = max(1, len(config.labels)) if scores else 0  # a config of encoders has no labels
    return _of_states(f"classifier of {architecture.name!r}", graph, scores, n)


def trace_dense(architecture: Architecture, config: Config, weights: Weights) -> Graph | None:
    """Record the dense layers of embeddings, None without.

    Raises PluginError for some that do not compute a vector from `g.previous_hidden`.
    """
    graph = Graph()
    vector = architecture.dense(graph, config, weights)
    return _of_states(f"dense of {architecture.name!r}", graph, vector, vector.width if vector else 0)


def _of_states(part: str, graph: Graph, result: Value | None, width: int) -> Graph | None:
    if result is None:
        return None
    if graph.ops[-1].out is not result or result.width != width:
        raise PluginError(f"{part} must end in the op that computes its {width} numbers, not {result.width}")
    if not graph.reads_hidden or graph.recurrent or graph.states:
        raise PluginError(f"{part} must read g.previous_hidden, and have neither attention nor recurrent states")
    if unread := graph.unread():
        raise PluginError(f"{part} computes what nothing reads: {', '.join(unread)}")
    return graph


def configured(architecture: Architecture, file: ModelFile) -> Any:
    """Configuration of a file, by its keys and its tensors' shapes."""
    config = architecture.configure(file.metadata)
    if not isinstance(architecture, HeadArchitecture):
        return config
    return architecture.of_shapes(config, {name: info.shape for name, info in file.tensors.items()})
