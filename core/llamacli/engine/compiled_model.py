"""Compiled models: program, tokenizer and the KV-cache memory of sequences."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llamacli.architecture import Config, checked_n_ctx
from llamacli.engine.adapters import (
    Adapter,
    Adapters,
    AdaptersLike,
    adapted_program,
    checked_adapters,
    key_of,
    load_adapter,
    without_scales,
)
from llamacli.engine.base import Program, Prompts, QuantMode
from llamacli.engine.batching import Chunk, evaluate
from llamacli.engine.stages import DividedProgram
from llamacli.errors import ClosedError, ContextOverflowError, EmbeddingModelError, InvalidRequestError
from llamacli.inputs import Inputs
from llamacli.kv import N_BATCH, KVCache, KVLayout, KVPool, KVSequence, KVType, PrefixIndex
from llamacli.kv.prompt_cache import PromptCache
from llamacli.tokenizer import Tokenizer
from llamacli.util.locking import fork_safe
from llamacli.util.memory import trim_heap

if TYPE_CHECKING:
    from llamacli.sampling import SamplerType

PREFIX_CACHE_BYTES = 256 << 20
PREFIX_CACHE_STATES = 8
"""Recurrent states that the prefix cache of a model can hold, even if they are more than PREFIX_CACHE_BYTES."""

KVTypes = str | tuple[str, str] | KVType
"""Types of cached keys and values: one name for both, or a pair."""


class AdaptedProgram:
    """Forward pass with a set of adapters, shared by its sessions.

    It is kept while one of them refers to it. `program` is None before it is compiled, and once the model is closed.
    """

    def __init__(self) -> None:
        self.program: Program | None = None


class CompiledModel:
    """Program, tokenizer and KV memory of a model, shared by its sessions.

    `llamacli.Model` adds the file's metadata, and creates sessions and chats. Only `config.n_ctx` may be changed.

    - `config`: its hyperparameters; lower `config.n_ctx` before creating a session to spend less memory.
    - `tokenizer`: its vocabulary.
    - `mode`: how its weights are kept.
    - `identity`: digest of its weights and metadata; saved states of other models are refused.
    - `prefix_cache_bytes`: size limit of the prefix cache, in bytes.
    - `adapters`: LoRA adapters of new sessions, with their scales.
    - `prompt_cache`: prefixes on disk, None for none.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        program: Program,
        mode: QuantMode,
        identity: str = "",
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ):
        self.config, self.tokenizer, self.mode = config, tokenizer, mode
        self._shapes = dict(shapes or {})
        self._adapters: Adapters = ()
        self._loaded_adapters: weakref.WeakSet[Adapter] = weakref.WeakSet()
        self._adapted: weakref.WeakValueDictionary[tuple[str, ...], AdaptedProgram] = weakref.WeakValueDictionary()
        self._last_adapted: weakref.WeakKeyDictionary[Adapter, AdaptedProgram] = weakref.WeakKeyDictionary()
        self._programs_lock = fork_safe(threading.Lock())
        state_bytes = sum(spec.n_bytes for spec in program.recurrent)
        self.identity = identity
        self.prefix_cache_bytes = max(PREFIX_CACHE_BYTES, PREFIX_CACHE_STATES * state_bytes)
        self.prompt_cache: PromptCache | None = None
        self._program: Program | None = program
        self._prompts = program.prompts
        self._load_nextn: Callable[[Program], Program] | None = None
        self._nextn: Program | None = None
        self._nextn_pool: KVPool | None = None
        self._layer_inputs: list[int] = []
        self._nextn_lock = fork_safe(threading.Lock())
        self._pools: dict[KVType, KVPool] = {}
        self._prefixes: dict[tuple[KVType, int], PrefixIndex] = {}

    @property
    def program(self) -> Program:
        """The compiled forward pass. Raises ClosedError after close()."""
        if self._program is None:
            raise ClosedError("the model is closed")
        return self._program

    @property
    def variant(self) -> str:
        """Mode of the weights, and of prompts unless they go through registers.

        With `identity` it says what results depend on.
        """
        return self.mode.value if self._prompts is Prompts.REGISTERS else f"{self.mode.value}-{self._prompts.value}"

    @property
    def adapters(self) -> Adapters:
        """LoRA adapters of new sessions, with their scales."""
        return self._adapters

    def load_adapter(self, path: str | os.PathLike[str]) -> Adapter:
        """Load a LoRA adapter for sessions of this model, see `create_session`.

        It is freed when neither a session nor the caller refers to it, or to others given along with it. Raises
        ModelFormatError, naming the key or tensor at fault, for a file that is no LoRA adapter of this model;
        ClosedError.
        """
        adapter = load_adapter(path, self.program, self.config.architecture, self._shapes)
        self._loaded_adapters.add(adapter)
        return adapter

    def check_adapters(self, adapters: AdaptersLike) -> Adapters:
        """Check adapters and their scales, see `llamacli.engine.adapters.checked_adapters`.

        Raises InvalidRequestError, also for an adapter that another model has loaded.
        """
        checked = checked_adapters(adapters)
        if other := next((one for one, _ in checked if one not in self._loaded_adapters), None):
            raise InvalidRequestError(f"the adapter {other.path} was loaded by another model")
        return checked

    def program_with(self, adapters: Adapters) -> Program:
        """The forward pass with adapters, which share its weights.

        It is compiled for a set of adapters, whatever their scales, unless `keep_program` keeps it or it was the last
        one used. Raises ClosedError after close().
        """
        if adapters:
            return self._find(self.program, adapters)[1]
        return self._program or self.program  # which is a call in each step

    def keep_program(self, adapters: Adapters) -> AdaptedProgram | None:
        """Compile the forward pass with adapters, to be kept.

        It is kept while the caller refers to the result, and has buffers of its own; close() frees it. Raises
        ClosedError after close().
        """
        program = self.program
        return self._find(program, adapters)[0] if adapters else None

    def _find(self, program: Program, adapters: Adapters) -> tuple[AdaptedProgram, Program]:
        used = without_scales(adapters)
        key = tuple(adapter.digest for adapter in used)
        with self._programs_lock:
            adapted = self._adapted.get(key) or AdaptedProgram()
            found = adapted.program or adapted_program(program, used)
            if not self.closed:
                adapted.program = found
                self._adapted[key] = adapted
                if self._last_adapted.get(used[0]) is not adapted:
                    self._last_adapted = weakref.WeakKeyDictionary({used[0]: adapted})
        return adapted, found

    def _forget_adapted(self) -> None:
        with self._programs_lock:
            for adapted in self._adapted.values():
                adapted.program = None

    @property
    def has_nextn(self) -> bool:
        """True if the file has a multi-token-prediction head (MTP, NextN)."""
        return self._load_nextn is not None

    def nextn_program(self) -> Program:
        """The compiled multi-token-prediction head, which shares the model's weights.

        The first call reads its own weights from the file. Raises InvalidRequestError if there is none, or if the
        forward pass gives no hidden states to it, ModelFormatError naming the tensor if the head is damaged or
        incomplete, or if the file has changed; ClosedError after close().
        """
        program = self.program
        if self._load_nextn is None:
            raise InvalidRequestError(f"the model {self.name!r} has no multi-token-prediction head")
        if not program.has_hidden:
            raise InvalidRequestError(f"the forward pass of {self.name!r} has no hidden states for a head")
        with self._nextn_lock:
            found = self._nextn or self._load_nextn(program)
            if not self.closed:
                self._nextn = found
        return found

    def nextn_pool(self) -> KVPool:
        """Page pool of the caches of the multi-token-prediction head.

        Raises what `nextn_program` raises.
        """
        program = self.nextn_program()
        if self._nextn_pool is None:
            self._nextn_pool = self.head_pool(program, "nextn")
        return self._nextn_pool

    def head_pool(self, program: Program, name: str) -> KVPool:
        """New page pool of the caches of a draft head."""
        kind = KVType.of("f32" if self.mode is QuantMode.FP32 else "f16")
        return KVPool(KVLayout.of(program.states, kind), f"{self.identity}-{name}")

    @property
    def n_layer_inputs(self) -> int:
        """Number of layers whose inputs the forward pass gives, too."""
        return len(self._layer_inputs)

    def pass_layer_inputs(self, layers: Sequence[int]) -> list[slice]:
        """Have the forward pass give the inputs of layers, too, to `take_hidden`.

        Returns their columns there, each `config.n_embd` wide; the hidden states are the first. Layers that another
        call has named stay. Raises InvalidRequestError for layers that the forward pass does not have, and on several
        machines; ClosedError.
        """
        wanted = [*dict.fromkeys((*self._layer_inputs, *layers))]
        if wanted != self._layer_inputs:
            program = self.program
            self._program = program.recompiled(program.graph.with_layer_inputs(wanted), {})
            self._layer_inputs = wanted
            self._forget_adapted()
        n = self.config.n_embd
        return [slice(n * at, n * (at + 1)) for at in (1 + wanted.index(layer) for layer in layers)]

    def encode_prompt(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of a prompt, with EOS only for an encoder.

        BOS is there where the model expects it. `parse_special` and errors are as for `Tokenizer.encode`.
        """
        encode = self.tokenizer.encode if self.program.has_encoder else self.tokenizer.encode_prompt
        return encode(text, parse_special=parse_special)

    def encoder_inputs(self, text: str | Sequence[int], decoder: Sequence[int] | None = None) -> Inputs:
        """Inputs that begin the context of an encoder-decoder model.

        `text`, for the encoder, becomes a span of tokens that attend to each other; the `decoder`'s tokens follow, by
        default `config.decoder_start` alone. A context holds both. Raises InvalidRequestError if the model has no
        encoder, if there is no token for the encoder or the decoder, or more than `N_BATCH` for the encoder.
        """
        if not self.program.has_encoder:
            raise InvalidRequestError(f"the model {self.name!r} has no encoder")
        ids = self.encode_prompt(text) if isinstance(text, str) else list(text)
        start = self.config.decoder_start
        tail = [*((start,) if decoder is None and start is not None else decoder or ())]
        if not ids or not tail:
            raise InvalidRequestError(f"there is no token for the {'decoder' if ids else 'encoder'}")
        if len(ids) > N_BATCH:
            raise InvalidRequestError(f"the encoder takes at most {N_BATCH} tokens at once, not {len(ids)}")
        return Inputs.of([*ids, *tail], spans=[(0, len(ids))])

    def prompt_inputs(self, ids: Sequence[int]) -> Sequence[int] | Inputs:
        """Inputs of a context's first prompt: `encoder_inputs`, or the ids themselves."""
        return self.encoder_inputs(ids) if self.program.has_encoder else ids

    def logits(self, inputs: Sequence[int] | Inputs) -> npt.NDArray[np.float32]:
        """Logits of all tokens of a text, float32 [n, n_vocab].

        `inputs`, token ids or an `Inputs`, begin a context of their own; an encoder's text in them has no logits. A
        model with attention in both directions, such as one of masked diffusion, has no other way to logits; its texts
        have at most `N_BATCH` tokens. Raises
        InvalidRequestError for inputs that the model cannot compute, ContextOverflowError for more than `config.n_ctx`
        tokens, EmbeddingModelError if the model has no logits.
        """
        given = inputs if isinstance(inputs, Inputs) else Inputs.of(inputs)
        program, n_ctx = self.program_with(self.adapters), self.context_size(None)
        if program.graph.ops[-1].out.width != self.config.n_vocab:
            raise EmbeddingModelError(f"the model {self.name!r} has no logits: use it for embeddings")
        if len(given) > n_ctx:
            raise ContextOverflowError(0, len(given), n_ctx)
        if program.needs_whole_input and len(given) > N_BATCH:
            raise InvalidRequestError(
                f"the input has {len(given)} tokens; this model attends in both directions and takes at most {N_BATCH}"
            )
        pool = self.kv_pool("f32" if program.needs_whole_input else None)
        sequence = KVSequence(pool, n_ctx, program.rope_variant(n_ctx), key_of(self.adapters))
        try:
            rows = evaluate(self.program_with, [Chunk(sequence, given, self.adapters, len(given))])[0]
        finally:
            sequence.close()
        return rows if len(given) else np.empty((0, self.config.n_vocab), np.float32)

    @property
    def name(self) -> str:
        """Name of the model in messages."""
        return self.config.architecture

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._program is None

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        With `add_special`, BOS and EOS are added where the model expects them. With `parse_special`, spelled special
        tokens become their ids; otherwise they stay text.
        """
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, the inverse of `encode`."""
        return self.tokenizer.decode(ids)

    def piece(self, token: int) -> str:
        """Text of one token on its own.

        A leading space is kept; bytes of a partial character become U+FFFD.
        """
        return self.tokenizer.piece(token)

    def find_sampler(self, name: str) -> SamplerType | None:
        """Find a sampler that is not built in; None if unknown."""
        return None

    def context_size(self, n_ctx: int | None) -> int:
        """Number of tokens of a new context; None stands for `config.n_ctx`.

        Raises InvalidRequestError if it is out of range, or longer than the model has learned positions.
        """
        n = checked_n_ctx(self.config.n_ctx if n_ctx is None else n_ctx)
        limit = self.program.max_positions
        if limit is not None and n > limit:
            raise InvalidRequestError(f"n_ctx must be at most {limit}, the positions that the model learned, not {n}")
        return n

    def kv_pool(self, kv_type: KVTypes | None = None) -> KVPool:
        """Page pool of all sequences with this `kv_type`.

        The default is f32 in fp32 mode, else f16.
        """
        if kv_type is None:
            kv_type = "f32" if self.mode is QuantMode.FP32 else "f16"
        kind = KVType.of(kv_type)
        if kind not in self._pools:
            held = self.program.graph.held
            layout = KVLayout.of(self.program.states, kind, self.program.recurrent, held)
            pool = KVPool(layout, f"{self.identity}-{self.variant}", logs=held is not None)
            self._pools.setdefault(kind, pool)  # another thread may be faster
        return self._pools[kind]

    def kv_cache(self, n_seq_max: int = 1, *, n_ctx_seq: int | None = None, kv_type: KVTypes | None = None) -> KVCache:
        """Create a cache of numbered sequences of up to `n_ctx_seq` tokens."""
        n_ctx = self.context_size(n_ctx_seq)
        shift_keys, rope_variant = self.program.shift_keys, self.program.rope_variant(n_ctx)

        def shifted(layer: int, keys: npt.NDArray[np.float32], by: int) -> npt.NDArray[np.float32]:
            return shift_keys(layer, keys, by, n_ctx)

        return KVCache(
            self.kv_pool(kv_type),
            n_ctx,
            n_seq_max,
            shift_keys=shifted,
            rope_variant=rope_variant,
            adapters=key_of(self.adapters),
        )

    def prefixes(self, kv_type: KVType, n_ctx: int) -> PrefixIndex:
        """Prefix cache of a cache type and a length's RoPE variant."""
        index = PrefixIndex(self.kv_pool(kv_type))
        return self._prefixes.setdefault((kv_type, self.program.rope_variant(n_ctx)), index)

    def close(self) -> None:
        """Free the weights and the prefix cache; closing twice does nothing.

        Their memory returns to the system at once. Sessions of this model can no longer evaluate then.
        """
        for index in self._prefixes.values():
            if self.prompt_cache is not None:
                self.prompt_cache.save(index)
            index.clear()
        if isinstance(self._program, DividedProgram):  # an error of a lost stage may refer to it as long as it lives
            self._program.close()
        self._program, self.prefix_cache_bytes = None, 0  # sessions closed from now on leave nothing in the cache
        self._pools, self._prefixes, self._adapters = {}, {}, ()
        self._nextn = self._nextn_pool = None
        self._forget_adapted()
        trim_heap()
