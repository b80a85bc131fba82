"""Loading models: from a file to something that sessions can be created from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llamacli.architecture import Architecture, Config, checked_seq_len, trace
from llamacli.engine import Engine, Program, QuantMode, default_engine
from llamacli.errors import (
    ClosedError,
    InvalidRequestError,
    ModelFormatError,
    PluginError,
    UnknownArchitectureError,
    plugin_errors,
)
from llamacli.gguf import Metadata
from llamacli.graph import Graph
from llamacli.kv import CacheStrategy, KVCache, KVLayout, KVPool, KVType, PrefixIndex
from llamacli.loaders import ModelFile, Progress, WatchedFile, identity, open_model_file
from llamacli.plugins import Plugins, installed_plugins
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata
from llamacli.util.closing import Closing

if TYPE_CHECKING:
    from llamacli.chat.formats import ChatFormat
    from llamacli.chat.session import ChatSession
    from llamacli.sampling import SamplerType
    from llamacli.session import Session

_log = logging.getLogger(__name__)

PREFIX_CACHE_BYTES = 256 << 20

KVTypes = str | tuple[str, str] | KVType
"""What names the types of cached keys and values: one name for both, or a pair."""


class Model(Closing):
    """A loaded model, read-only but for `config.seq_len`; any number of sessions may share it.

    - `arch`: its `general.architecture`.
    - `config`: its hyperparameters; lower `config.seq_len` before creating a session to spend less memory.
    - `tokenizer`: its vocabulary.
    - `metadata`: every key of its file.
    - `mode`: how its weights are kept.
    - `identity`: what tells its weights and mode from others', for states that are saved and restored.
    - `prefix_cache_bytes`: how much of what sessions have evaluated is kept when they are closed, or have gone on and
      sliding windows with them, for others that begin alike.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        metadata: Metadata,
        program: Program,
        mode: QuantMode,
        plugins: Plugins | None = None,
        identity: str = "",
    ):
        self._plugins = plugins or installed_plugins()
        self.identity, self.prefix_cache_bytes = identity, PREFIX_CACHE_BYTES
        self.config, self.tokenizer, self.metadata, self.mode = config, tokenizer, metadata, mode
        self.arch = config.architecture
        self._program: Program | None = program
        self._pools: dict[KVType, KVPool] = {}
        self._prefixes: dict[tuple[KVType, int], PrefixIndex] = {}

    @property
    def program(self) -> Program:
        """The compiled forward pass. Raises ClosedError after close()."""
        if self._program is None:
            raise ClosedError("the model is closed")
        return self._program

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        With `add_special`, BOS and EOS are added where the model expects them. With `parse_special`, spelled special
        tokens become their ids; otherwise they stay text.
        """
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, the inverse of `encode`."""
        return self.tokenizer.decode(ids)

    def piece(self, token: int) -> str:
        """The text of one token on its own, leading space kept; bytes of a partial character become U+FFFD."""
        return self.tokenizer.piece(token)

    def chat_formats(self) -> list[ChatFormat]:
        """The chat formats that there are, the core's and the plugins'."""
        from llamacli.chat.formats import CORE_FORMATS

        return [*self._plugins.chat_formats(), *CORE_FORMATS]

    def find_sampler(self, name: str) -> SamplerType | None:
        """The sampler of this name that a plugin brings, if there is one."""
        return self._plugins.sampler(name)

    def create_session(
        self,
        *,
        seq_len: int | None = None,
        kv_type: KVTypes | None = None,
        seed: int = 1234,
        strategy: str | CacheStrategy = CacheStrategy.ALWAYS,
        reuse: bool = True,
    ) -> Session:
        """A new generation stream with an empty context of `seq_len` tokens (default: `config.seq_len`, read now).

        `kv_type` is the type of cached keys and values, one of `llamacli.kv.KV_TYPES` such as "q8_0", or a pair of
        them; the default is f32 in fp32 mode, else f16. `strategy` says when they are cached at all rather than
        computed again, see `llamacli.kv.CacheStrategy`. With `reuse`, tokens that another session of this model has
        begun with too are not evaluated again, but share its pages; results are the same.
        Raises InvalidRequestError for a value out of range, MemoryError if the cache cannot be allocated.
        """
        from llamacli.session import Session

        return Session(self, seq_len=seq_len, kv_type=kv_type, seed=seed, strategy=strategy, reuse=reuse)

    def kv_pool(self, kv_type: KVTypes | None = None) -> KVPool:
        """The memory of all sequences whose keys and values are kept as `kv_type` (default: as `create_session`)."""
        if kv_type is None:
            kv_type = "f32" if self.mode is QuantMode.FP32 else "f16"
        kind = KVType.of(kv_type)
        if kind not in self._pools:
            pool = KVPool(KVLayout.of(self.program.states, kind), f"{self.identity}-{self.mode.value}")
            self._pools.setdefault(kind, pool)  # another thread may be faster
        return self._pools[kind]

    def kv_cache(self, n_seq_max: int = 1, *, seq_len: int | None = None, kv_type: KVTypes | None = None) -> KVCache:
        """Numbered sequences of up to `seq_len` tokens each, which share pages; see `Session` for how to run one."""
        seq_len = checked_seq_len(self.config.seq_len if seq_len is None else seq_len)
        shift_keys, rope_variant = self.program.shift_keys, self.program.rope_variant(seq_len)

        def shifted(layer: int, keys: npt.NDArray[np.float32], by: int) -> npt.NDArray[np.float32]:
            return shift_keys(layer, keys, by, seq_len)

        return KVCache(self.kv_pool(kv_type), seq_len, n_seq_max, shift_keys=shifted, rope_variant=rope_variant)

    def prefixes(self, kv_type: KVType, seq_len: int) -> PrefixIndex:
        """What sessions of this type and of such a length have evaluated and can share."""
        index = PrefixIndex(self.kv_pool(kv_type))
        return self._prefixes.setdefault((kv_type, self.program.rope_variant(seq_len)), index)

    def create_chat(
        self,
        system: str = "",
        max_new: int = 256,
        *,
        session: Session | None = None,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **variables: Any,
    ) -> ChatSession:
        """A conversation, in a session of its own or in the one that is given.

        `template` is asked for in the place of the file's own: Jinja source, the name of another that the file brings,
        or of a plugin's. `tools` are JSON objects that describe functions. `variables` are handed to the template,
        such as `enable_thinking=False` or `reasoning_effort="low"`.

        Raises ChatTemplateError if there is no template, or a broken one; InvalidRequestError for a value out of range.
        """
        from llamacli.chat.session import ChatSession

        return ChatSession(
            self,
            system,
            max_new,
            session=session,
            template=template,
            tools=tools,
            plugins=self._plugins,
            variables=variables,
        )

    def close(self) -> None:
        """Free the weights. Sessions of this model can no longer evaluate; closing twice does nothing."""
        for index in self._prefixes.values():
            index.clear()
        self._program, self.prefix_cache_bytes = None, 0  # sessions that are closed from now on leave nothing
        self._pools, self._prefixes = {}, {}

    def __repr__(self) -> str:
        return f"<Model {self.arch}, {self.config.n_layer} layers, mode {self.mode.value}>"


def load_model(
    path: str | os.PathLike[str],
    mode: str | QuantMode = QuantMode.AUTO,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    plugins: Plugins | None = None,
    engine: Engine | None = None,
    transform: Callable[[Graph], Graph] = lambda graph: graph,
) -> Model:
    """Load a model file; its metadata decides which plugin runs it.

    `mode` is how weights are kept: "auto" in the file's own types, "fp32" exact, "q8" or "q4" requantised. `threads`
    is how many cores compute, by default every one that this process may use; results do not depend on it. `progress`
    is called with the bytes of tensors that have been gone through so far, and the bytes of all. `plugins` and `engine`
    default to the installed plugins and the fastest engine that runs here. `transform` makes of the recorded forward
    pass the one that is compiled; what that computes takes the place of logits.

    Raises ModelFormatError if the file is unreadable, malformed or does not fit its architecture,
    UnknownArchitectureError if no plugin runs it, PluginError if the plugin is broken.
    """
    try:
        mode = QuantMode(mode)
    except ValueError:
        raise InvalidRequestError(f"mode {mode!r} is not one of {', '.join(QuantMode)}") from None
    plugins = plugins or installed_plugins()
    file = open_model_file(path, plugins)
    try:
        if not file.tensors:
            raise ModelFormatError(f"{file.path}: it has no tensors: a vocabulary only")
        architecture = plugins.resolve(file.metadata)
        with plugin_errors(f"architecture {architecture.name!r}"):
            config = architecture.configure(file.metadata)
            table = architecture.tensors(config)
            weights = table.bind(file)
            graph = trace(architecture, config, weights)
        tokenizer = _tokenizer_of(file.metadata, architecture)
        _check_vocabulary(file, config, tokenizer)
        _check_all_read(file, graph, table.unused)
        watched = WatchedFile(file, progress or (lambda done, n_bytes: None))
        program = (engine or default_engine(threads)).compile(transform(graph), watched, mode)
        watched.done()
        _warn_of_unread_keys(file.metadata, config.architecture)
        told_by = identity(file)
    finally:
        file.close()
    model = Model(config, tokenizer, file.metadata, program, mode, plugins, told_by)
    plugins.ask_each("model_loaded", model=model)
    return model


def load_tokenizer(path: str | os.PathLike[str], *, plugins: Plugins | None = None) -> Tokenizer:
    """The tokenizer of a model file, or of a GGUF file that has a vocabulary and no weights.

    Raises ModelFormatError if the file is unreadable or malformed, TokenizerError if its scheme is unknown.
    """
    plugins = plugins or installed_plugins()
    file = open_model_file(path, plugins)
    try:
        architecture = plugins.resolve(file.metadata) if "general.architecture" in file.metadata else None
    except UnknownArchitectureError:
        architecture = None  # what is peculiar to a family cannot be known without its plugin
    finally:
        file.close()
    return _tokenizer_of(file.metadata, architecture)


def _tokenizer_of(metadata: Metadata, architecture: Architecture | None) -> Tokenizer:
    if architecture is None:
        return tokenizer_from_metadata(metadata)
    strips_after, part = architecture.strips_after, f"architecture {architecture.name!r}"

    def guarded(special: str) -> bool:
        with plugin_errors(part):
            return strips_after(metadata, special)

    return tokenizer_from_metadata(metadata, guarded)


def _check_vocabulary(file: ModelFile, config: Config, tokenizer: Tokenizer) -> None:
    if tokenizer.n_vocab != config.n_vocab:
        raise ModelFormatError(
            f"{file.path}: the tokenizer has {tokenizer.n_vocab} tokens and the model {config.n_vocab}"
        )


def _check_all_read(file: ModelFile, graph: Graph, unused: set[str]) -> None:
    """A tensor that is in the file and the table but in no op would be left out of the computation silently."""
    read = {tensor.name for op in graph.ops for tensor in op.tensors()} | unused
    unread = [name for name in file.tensors if name not in read]
    if unread:
        raise PluginError(f"{file.path}: the architecture's forward pass leaves out {', '.join(unread)}")


def _warn_of_unread_keys(metadata: Metadata, architecture: str) -> None:
    """A key of the architecture that nothing read may mean a variant that would be computed wrongly."""
    known = metadata.consumed | {f"{architecture}.pooling_type"}  # it matters after the forward pass
    unread = sorted(key for key in metadata if key.startswith(f"{architecture}.") and key not in known)
    if unread:
        _log.warning("%s: metadata keys that the architecture does not use: %s", metadata.source, ", ".join(unread))
