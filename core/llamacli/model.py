"""Model loading, and the model that creates sessions and chats."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import threading
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from llamacli.architecture import (
    Architecture,
    BlockHeadArchitecture,
    CacheHeadArchitecture,
    Config,
    HeadArchitecture,
    configured,
    trace,
    trace_block_head,
    trace_cache_head,
    trace_classifier,
    trace_dense,
    trace_head,
    trace_nextn,
)
from llamacli.engine import Engine, LoadMode, Program, Prompts, QuantMode, default_engine, jit_disabled
from llamacli.engine.adapters import AdaptersLike, checked_scale
from llamacli.engine.classifier import Classifier, Dense
from llamacli.engine.compiled_model import CompiledModel, KVTypes
from llamacli.engine.heads import Head
from llamacli.engine.memory import Need, stays_on_disk
from llamacli.engine.packed_copies import copy_key
from llamacli.engine.sharing import file_key, find_program, shared_program
from llamacli.errors import (
    ContextOverflowError,
    InvalidRequestError,
    MediaError,
    ModelFormatError,
    PluginError,
    UnknownArchitectureError,
    expect_path,
    expect_type,
    plugin_errors,
)
from llamacli.gguf import GGUFFile, Metadata
from llamacli.graph import Graph, Param
from llamacli.inputs import Inputs
from llamacli.kv import CacheStrategy
from llamacli.loaders import LabelledFile, ModelFile, Progress, WatchedFile, identity, open_model_file
from llamacli.parts import describe_parts
from llamacli.plugins import Plugins, installed_plugins
from llamacli.quantization import TensorType
from llamacli.tensor_table import TensorTable, Weights
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata
from llamacli.util.asynchronous import in_threads
from llamacli.util.foreign_names import explain_names, missing_method
from llamacli.util.locking import fork_safe
from llamacli.util.numbers import is_integer

if TYPE_CHECKING:
    from llamacli.chat.codec import ChatCodec
    from llamacli.chat.formats import ChatFormat
    from llamacli.chat.functions import Tools
    from llamacli.chat.session import ChatSession
    from llamacli.generation.loop import Generated
    from llamacli.media.encoder import LoadedEncoder
    from llamacli.sampling import SamplerType, SamplingParams
    from llamacli.session import Session

_log = logging.getLogger(__name__)

_HEAD = "draft."
"""Beginning of the names of a draft head's tensors, beside the model's."""

_READ_LATER = ("general.", "tokenizer.chat_template")
"""Keys that are read when they are needed, after the model is loaded."""


class Model(CompiledModel, contextlib.AbstractContextManager["Model"]):
    """Loaded model, shared by any number of sessions.

    It is read-only but for `config.n_ctx`.

    - `arch`: its `general.architecture`.
    - `config`: its hyperparameters; lower `config.n_ctx` before creating a session to spend less memory.
    - `tokenizer`: its vocabulary.
    - `metadata`: every key of its file.
    - `mode`: how its weights are kept.
    - `identity`: digest of its weights and metadata; saved states of other models are refused.
    - `prefix_cache_bytes`: size limit of the prefix cache, in bytes.
    - `adapters`: LoRA adapters of new sessions, with their scales.
    - `classifier`: head of a reranker, None without one; `dense`: layers behind hidden states for embeddings.
    """

    classifier: Classifier | None = None
    dense: Dense | None = None

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        metadata: Metadata,
        program: Program,
        mode: QuantMode,
        plugins: Plugins | None = None,
        identity: str = "",
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ):
        super().__init__(config, tokenizer, program, mode, identity, shapes)
        self.arch, self.metadata = config.architecture, metadata
        self._plugins = plugins or installed_plugins()
        self._load_media: Callable[[Model], LoadedEncoder | None] = lambda model: None
        self._media: LoadedEncoder | None = None
        self._media_lock = fork_safe(threading.Lock())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, which names ours for methods of llama-cpp-python."""
            if hasattr(type(self), name):  # a property raised it
                object.__getattribute__(self, name)
            raise AttributeError(missing_method(type(self).__name__, name), name=name, obj=self)

    @classmethod
    @explain_names
    def from_pretrained(cls, name: str, mode: str | QuantMode = QuantMode.AUTO, **options: Any) -> Model:
        """Load a model of the Hugging Face hub, downloaded unless cached.

        `name`, `mode`, `options` and errors are as of `load_model`.
        """
        return load_model(name, mode, **options)

    @property
    def name(self) -> str:
        """Name of the model: that in its file, or its architecture."""
        return self.metadata.get_str("general.name", "") or self.arch

    def media_encoder(self) -> LoadedEncoder:
        """Encoder of pictures or sound, from the model's mmproj file.

        That file is the one given to `load_model`, or one in the folder of the model's. The first call loads it. Raises
        MediaError if there is none, ClosedError after close(), and what `load_model` raises for a mmproj file.
        """
        found = self.find_media_encoder()
        if found is None:
            raise MediaError(
                f"the model {self.name!r} has no encoder of pictures or sound: there is no mmproj file of it in its "
                "folder; name one by `mmproj`"
            )
        return found

    def find_media_encoder(self) -> LoadedEncoder | None:
        """Encoder as `media_encoder` returns it, None if there is none."""
        self.program  # noqa: B018 - raises ClosedError
        with self._media_lock:
            self._media = self._media or self._load_media(self)
            return self._media

    def close(self) -> None:
        """Free the weights, the prefix cache and the encoder of pictures.

        Closing twice does nothing.
        """
        media, self._media = self._media, None
        if media is not None:
            media.close()
        super().close()

    def load_draft(
        self, path: str | os.PathLike[str], mode: str | QuantMode = QuantMode.AUTO, **options: Any
    ) -> Model | Head:
        """Load a draft model, or a draft head of this model.

        The file's metadata says which it is. `mode` and `options` are arguments of `load_model`, for draft models. A
        head is kept in this model's mode; its embeddings and output layer are this model's where its file has none.
        Raises what `load_model` raises, and ModelFormatError, naming key or tensor, for a head of another model;
        InvalidRequestError on several machines.
        """
        with contextlib.closing(open_model_file(_named(path), self._plugins.loaders())) as file:
            architecture = _resolve(self._plugins, file)
            if isinstance(architecture, HeadArchitecture):
                with plugin_errors(f"architecture {architecture.name!r}"):
                    return _load_head(self, architecture, file)
        return load_model(path, mode, plugins=self._plugins, **options)

    def chat_formats(self) -> list[ChatFormat]:
        """Chat formats of the plugins, then of the core."""
        from llamacli.chat.formats import CORE_FORMATS

        return [*self._plugins.chat_formats(), *CORE_FORMATS]

    def find_sampler(self, name: str) -> SamplerType | None:
        """Sampler of this name that a plugin registers, if there is one."""
        return self._plugins.sampler(name)

    def added_samplers(self) -> list[str]:
        """Names of the samplers that plugins register."""
        return self._plugins.sampler_names()

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the defaults of the model's file, else llama.cpp's.

        `given` are fields of SamplingParams. The command line, the server and `create_chat_completion` sample with
        these; without parameters sessions and chats are greedy. A `repeat_last_n` of -1 is `config.n_ctx`. Raises
        InvalidRequestError for a value that is not valid, ModelFormatError for one of the file.
        """
        from llamacli.sampling.defaults import params_with_defaults

        return params_with_defaults(given, self.metadata, self.config.n_ctx, self.find_sampler)

    @explain_names
    def create_session(
        self,
        *,
        n_ctx: int | None = None,
        kv_type: KVTypes | None = None,
        seed: int | None = 1234,
        strategy: str | CacheStrategy = CacheStrategy.ALWAYS,
        reuse: bool = True,
        adapters: AdaptersLike | None = None,
    ) -> Session:
        """Create a session with an empty context of `n_ctx` tokens.

        The default is `config.n_ctx`, read now. `kv_type` is the type of cached keys and values, one of
        `llamacli.kv.KV_TYPES` such as "q8_0", or a pair of them; the default is f32 in fp32 mode, else f16. `strategy`
        says when they are cached at all rather than computed again, see `llamacli.kv.CacheStrategy`. With `reuse`, a
        prompt that begins as another session's of this model is not evaluated again that far: the pages are shared
        (prefix caching); results are the same. `adapters` are LoRA adapters of `load_adapter`, each with its scale,
        such as `[(adapter, 0.5)]`; the default are `load_model`'s.

        Raises InvalidRequestError for a value out of range, EmbeddingModelError if the model only embeds texts,
        MemoryError if the cache cannot be allocated.
        """
        from llamacli.session import Session

        return Session(self, n_ctx=n_ctx, kv_type=kv_type, seed=seed, strategy=strategy, reuse=reuse, adapters=adapters)

    @explain_names
    def create_chat(
        self,
        system: str = "",
        max_tokens: int | None = None,
        *,
        session: Session | None = None,
        seed: int | None = 1234,
        template: str | None = None,
        tools: Tools | None = None,
        **variables: Any,
    ) -> ChatSession:
        """Create a conversation, in a new session or in `session`.

        `seed` is for draws in a new session, as for `create_session`. `template` replaces the file's own chat
        template: Jinja source, the name of another template of the file, or of a plugin's. `tools` are Python functions
        with type hints, which `ChatSession.run_tools` calls, or JSON objects that describe functions. `variables` are
        passed to the template, such as `enable_thinking=False` or `reasoning_effort="low"`.

        Raises ChatTemplateError if there is no template, or a broken one; InvalidRequestError for a value out of range.
        """
        from llamacli.chat.session import ChatSession

        return ChatSession(
            self,
            system,
            max_tokens,
            session=session,
            seed=seed,
            metadata=self.metadata,
            formats=self._plugins.chat_formats(),
            template=template,
            tools=tools,
            variables=variables,
            media=self.media_encoder,
        )

    def create_chat_codec(self, template: str | None = None, *, tools: bool | Sequence[Any] = False) -> ChatCodec:
        """Create the encoder of prompts and decoder of replies, without a session.

        `template` is as for `create_chat`. With `tools`, True or the tools themselves, the file's template for tools is
        taken, if it has one. Raises ChatTemplateError if there is no template, or a broken one.
        """
        from llamacli.chat.codec import ChatCodec

        return ChatCodec(self.tokenizer, self.metadata, self._plugins.chat_formats(), template, tools=bool(tools))

    @explain_names
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        seed: int | None = 1234,
        n_parallel: int = 16,
    ) -> list[Generated]:
        """Generate the text after each of several prompts.

        These are text or token ids. Up to `n_parallel` are evaluated together (batching), with one pass over the
        weights for all. Each result equals `generate` in a new session with this `seed`. Without `params` the most
        probable tokens are taken. Raises InvalidRequestError for a value out of range, ContextOverflowError for a
        prompt that does not fit.
        """
        from llamacli.generation.loop import generate_batch, token_limit
        from llamacli.generation.stream import eval_batch
        from llamacli.sampling import SamplingParams

        if isinstance(prompts, str):
            raise InvalidRequestError("prompts is a list of texts or of token ids: put a single text into a list")
        if not is_integer(n_parallel) or n_parallel < 1:
            raise InvalidRequestError(f"n_parallel must be an integer of at least 1, not {n_parallel!r}")
        limit = token_limit(max_tokens, self.config.n_ctx)
        ids = [
            self.prompt_inputs(self.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt))
            for prompt in prompts
        ]
        for prompt in ids:
            if len(prompt) > self.config.n_ctx:
                raise ContextOverflowError(0, len(prompt), self.config.n_ctx)
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(self.create_session(seed=seed)) for _ in ids]
            return generate_batch(sessions, ids, eval_batch, params or SamplingParams(), limit, n_parallel)

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[False] = ..., **arguments: Any
    ) -> dict[str, Any]: ...

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[True], **arguments: Any
    ) -> Iterator[dict[str, Any]]: ...

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Any = None,
        max_tokens: int | None = None,
        stream: bool = False,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Reply to a conversation, with llama-cpp-python's arguments and results.

        `messages` and `tools` are dictionaries as in OpenAI's API, and so is the result, or with `stream` each chunk of
        it; pictures are `image_url` parts with data URIs. A tool may be a Python function; nothing calls it, see
        `ChatSession.run_tools` for that. With a Pydantic model as `response_format`, `parsed` of the message is an
        instance, None if the reply was cut. Without `max_tokens` the context is the limit. `template` and `variables`
        are as for `create_chat`; further `arguments` are fields of `llamacli.chat.completions.CompletionArguments`.
        Each call has a session of its own; what earlier calls had in common with it is not evaluated again.

        Raises at once InvalidRequestError for a value that is not valid, ChatTemplateError if there is no template or
        it cannot render the messages, ContextOverflowError if they do not fit, MediaError for a picture that cannot be
        read, TypeError for an unknown argument.
        """
        from llamacli.chat.completions import chat_completion, completion_arguments, whole
        from llamacli.chat.functions import described

        given, _ = described(tools)
        chunks = chat_completion(
            self,
            self.metadata,
            self.create_chat_codec(template, tools=bool(given)),
            messages,
            completion_arguments(self.create_chat_completion, arguments),
            tools=given,
            tool_choice=tool_choice,
            response_format=response_format,
            max_tokens=max_tokens,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            variables=variables,
            media=self.find_media_encoder,
        )
        return chunks if stream else whole(chunks)

    @overload
    def create_completion(
        self, prompt: str | Sequence[int] | Inputs, *, stream: Literal[False] = ..., **arguments: Any
    ) -> dict[str, Any]: ...

    @overload
    def create_completion(
        self, prompt: str | Sequence[int] | Inputs, *, stream: Literal[True], **arguments: Any
    ) -> Iterator[dict[str, Any]]: ...

    def create_completion(
        self,
        prompt: str | Sequence[int] | Inputs,
        *,
        suffix: str | None = None,
        max_tokens: int | None = 16,
        echo: bool = False,
        logprobs: int | None = None,
        stream: bool = False,
        **arguments: Any,
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Continue a prompt, with llama-cpp-python's arguments and results.

        The prompt is text, token ids or an `Inputs`. Results are dictionaries as in OpenAI's API, with `stream` one for
        each chunk. `max_tokens` None, 0 or less is as many as fit into the context; `echo` puts the prompt first. With
        a `suffix` the text comes between the prompt and it (fill-in-the-middle). Further `arguments` and errors are as
        for `create_chat_completion`; InvalidRequestError for `echo` or a `suffix` with an `Inputs`; TokenizerError
        if the vocabulary has no tokens for a suffix.
        """
        from llamacli.chat.completions import completion, completion_arguments, whole

        options = completion_arguments(self.create_completion, arguments)
        chunks = completion(
            self,
            self.metadata,
            prompt,
            options,
            suffix=suffix,
            max_tokens=max_tokens,
            echo=echo,
            logprobs=logprobs,
        )
        return chunks if stream else whole(chunks)

    async def create_chat_completion_async(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False, **arguments: Any
    ) -> Any:
        """Reply to a conversation, computing in threads.

        The event loop goes on meanwhile. Arguments, result and errors are as of `create_chat_completion`; with
        `stream` the result is an asynchronous generator of its chunks. When the task is cancelled, the token being
        computed is finished first.
        """
        return await _in_threads(self.create_chat_completion(messages, stream=True, **arguments), stream)

    async def create_completion_async(
        self, prompt: str | Sequence[int] | Inputs, *, stream: bool = False, **arguments: Any
    ) -> Any:
        """Continue a prompt as `create_completion`, in the way of `create_chat_completion_async`."""
        return await _in_threads(self.create_completion(prompt, stream=True, **arguments), stream)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        about = f"{self.arch}, {self.config.n_layer} layers, a context of {self.config.n_ctx} tokens"
        return f"<Model {self.name!r}, {about}, mode {self.mode.value}{state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a model cannot be copied or pickled: share it, or load its file again")


async def _in_threads(chunks: Any, stream: bool) -> Any:
    def with_result() -> Generator[Any, None, None]:
        yield (yield from chunks)

    if stream:
        return in_threads(chunks)
    async with contextlib.aclosing(in_threads(with_result())) as items:
        return [item async for item in items][-1]


@explain_names
def load_model(
    path: str | os.PathLike[str],
    mode: str | QuantMode = QuantMode.AUTO,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    plugins: Plugins | None = None,
    engine: Engine | None = None,
    transform: Callable[[Graph], Graph] | None = None,
    lora_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    lora_scale: float | Sequence[float] = 1.0,
    load: str | LoadMode = LoadMode.AUTO,
    prompts: str | Prompts = Prompts.REGISTERS,
    overrides: Mapping[str, str | bool | int | float] | None = None,
    mmproj: str | os.PathLike[str] | None = None,
) -> Model:
    """Load a model file, with the plugin of its architecture.

    `path` is the path of a file; a string may also be a name that the command line takes: `user/repo` or
    `user/repo:Q4_K_M` of the Hugging Face hub, an address there, a short name (`llamacli list --names` prints them).
    A model of the hub is downloaded unless cached.

    `mode` is how weights are kept: "auto" in the file's own types, "fp32" exact, "q8" or "q4" requantized. `threads`
    is how many cores compute, by default every one that this process may use; results do not depend on it. `progress`
    is called with the bytes of tensors that have been read so far, and the bytes of all. `plugins` and `engine` default
    to the installed plugins and the fastest engine that runs here. `transform` rewrites the recorded forward pass
    before it is compiled; what that outputs takes the place of logits. Without `engine` and `transform`, loading a GGUF
    file that is loaded already, with the same `mode` and `threads`, shares its weights; each model is closed by itself.
    `lora_path` is a LoRA adapter or several, which all sessions get unless they are created with others; `lora_scale`
    is the scale of all, or of each. `load` is where weights lie: "memory", or "map" for a packed copy in the cache
    folder, which the system reads when it is used; "auto" maps those that do not fit into the free memory. `prompts`
    is how tokens of prompts are multiplied: by "registers", as generated ones, or by "tiles" of AMX, about twice as
    fast, with weights and activations in bfloat16; then a reply is evaluated again once it is part of a prompt. An
    `engine` has its own.

    `overrides` replace keys of the file's metadata; `{arch}` in a key stands for `general.architecture`, as in
    `{arch}.rope.scaling.factor`.

    `mmproj` is the file of the encoder of pictures. Without it, the one in the model's folder whose embeddings are as
    wide as the model's is loaded when the first picture comes.

    Raises HubError if a model cannot be downloaded; InvalidRequestError for an override of another type, or of a key
    that nothing reads, if the weights fit neither into memory nor on the disk, and if prompts are to go through tiles
    on a CPU without AMX; ModelFormatError if the file is unreadable, malformed or does not fit its architecture,
    UnknownArchitectureError if no plugin runs it, PluginError if the plugin is broken.
    """
    expect_path(path, "path")
    lora = _lora(lora_path, lora_scale)
    expect_type(threads, (Integral, NoneType), "threads", "a number")
    expect_type(plugins, (Plugins, NoneType), "plugins", "of Plugins")
    expect_type(overrides, (Mapping, NoneType), "overrides", "a mapping of keys")
    try:
        mode = QuantMode(mode)
    except ValueError:
        raise InvalidRequestError(f"mode {mode!r} is not one of {', '.join(QuantMode)}") from None
    if load not in tuple(LoadMode):
        raise InvalidRequestError(f"load {load!r} is not one of {', '.join(LoadMode)}")
    if prompts not in tuple(Prompts):
        raise InvalidRequestError(f"prompts {prompts!r} is not one of {', '.join(Prompts)}")
    prompts = Prompts(prompts)
    plugins = plugins or installed_plugins()
    file = open_model_file(_named(path), plugins.loaders())
    try:
        overridden = file.metadata.override(overrides or {})
        if not file.tensors:
            raise ModelFormatError(f"{file.path}: it has no tensors: a vocabulary only")
        architecture = _resolve(plugins, file)
        if isinstance(architecture, HeadArchitecture):
            raise ModelFormatError(
                f"{file.path}: {architecture.name!r} is a draft head, no model by itself: give it with the model that "
                "it was trained for, as --draft"
            )
        paths = file.paths if engine is None and transform is None and isinstance(file, GGUFFile) else []
        model_id = identity(file)
        key = (file_key(paths), model_id, mode, prompts, threads, jit_disabled(), architecture) if paths else ()
        program = find_program(key)
        if load == LoadMode.MAP and not key:
            raise InvalidRequestError("load 'map' is for GGUF files, without `engine` and `transform`")
        with plugin_errors(f"architecture {architecture.name!r}"):
            config = architecture.configure(file.metadata)
            table = architecture.tensors(config)
            weights = table.bind(file)
            graph = trace(architecture, config, weights)
        compiler = engine
        if compiler is None:
            name, mapped = copy_key(paths, model_id, mode) if key and not program else None, False
            if program is None:
                can_map = name is not None and not jit_disabled()
                mapped = stays_on_disk(LoadMode(load), Need.of(graph, file, mode), file.path, can_map=can_map)
            compiler = default_engine(threads, name, prompts, mapped=mapped)
        with plugin_errors(f"architecture {architecture.name!r}"):
            head, dense = (make(architecture, config, weights) for make in (trace_classifier, trace_dense))
        tokenizer = _tokenizer_of(file.metadata, architecture)
        _check_vocabulary(file, config, tokenizer)
        heads = {tensor.name for part in (head, dense) if part for op in part.ops for tensor in op.tensors()}
        _check_all_read(file, graph, table.unused | table.ignored(file) | heads)
        watched = WatchedFile(file, progress or (lambda done, n_bytes: None))
        _expect_read(file.metadata, overridden)
        _warn_of_unread_keys(file.metadata, config.architecture)

        def compiled() -> Program:
            with plugin_errors(f"architecture {architecture.name!r}"):
                try:
                    return compiler.compile(graph if transform is None else transform(graph), watched, mode)
                except KeyboardInterrupt:
                    raise KeyboardInterrupt from None  # without pages of Numba's frames

        if program is None:
            program = shared_program(key, compiled) if key else compiled()
        if prompts not in (Prompts.REGISTERS, program.prompts):
            raise InvalidRequestError(
                f"prompts {prompts.value!r}: the given engine has prompts {program.prompts.value!r}"
            )
        softmax = architecture.classifier_softmax
        classifier = Classifier.load(head, watched, softmax=softmax) if head else None
        layers = Dense.load(dense, watched) if dense else None
        watched.done()
    finally:
        file.close()
    shapes = {name: info.shape for name, info in file.tensors.items()}
    model = Model(config, tokenizer, file.metadata, program, mode, plugins, model_id, shapes)
    model.classifier, model.dense = classifier, layers
    if table.has_nextn and any(".nextn." in name for name in shapes):
        model._load_nextn = partial(
            _load_nextn, Path(path).absolute(), plugins, architecture, config, table, model_id, key, overrides or {}
        )
    model._load_media = partial(_load_media, Path(path).absolute(), mmproj, threads, engine)
    try:
        if mmproj is not None:
            model.media_encoder()
        model._adapters = model.check_adapters([(model.load_adapter(one), scale) for one, scale in lora])
    except BaseException:
        model.close()
        raise
    plugins.call_each("model_loaded", model=model)
    return model


def _load_nextn(
    path: Path,
    plugins: Plugins,
    architecture: Architecture,
    config: Config,
    table: TensorTable,
    model_id: str,
    key: tuple[Hashable, ...],
    overrides: Mapping[str, Any],
    program: Program,
) -> Program:
    """Compile the multi-token-prediction head of a model's file.

    It shares the weights of the model's program. Models that share the program, by its `key`, share the head.
    """
    with contextlib.closing(open_model_file(path, plugins.loaders())) as file:
        file.metadata.override(overrides)
        if identity(file) != model_id:
            raise ModelFormatError(f"{path}: the file has changed since the model was loaded")
        with plugin_errors(f"architecture {architecture.name!r}"):
            graph = trace_nextn(architecture, config, table.bind(file, nextn=True))
        if graph is None:
            raise InvalidRequestError(f"the plugin of {architecture.name!r} does not compute multi-token prediction")
        compiled = partial(program.extended, graph, file)
        return shared_program((*key, "nextn"), compiled) if key else compiled()


def _load_head(model: Model, architecture: HeadArchitecture, file: ModelFile) -> Head:
    """Compile the draft head of a file beside a model's forward pass."""
    metadata = file.metadata
    name = f"draft head {metadata.get_str('general.name', default='') or file.path.name!r}"
    config = configured(architecture, file)
    weights = architecture.tensors(config).bind(file, label=_HEAD)
    if not _tokenizer_of(metadata, architecture).has_tokens_of(model.tokenizer):
        raise ModelFormatError(
            f"{file.path}: the {name} has another vocabulary than the model {model.name!r}: {config.n_vocab} and "
            f"{model.config.n_vocab} tokens"
        )
    injector, biases, block, n_candidates = None, None, (0, 0, False, 1), None
    reads_cache = isinstance(architecture, CacheHeadArchitecture)
    if not reads_cache:
        _share_weights(model, weights, config, f"{file.path}: the {name}")
    if isinstance(architecture, CacheHeadArchitecture):
        fuser, graph = trace_cache_head(architecture, config, weights, model.program.graph)
    elif isinstance(architecture, BlockHeadArchitecture):
        fuser, injector, graph, biases = trace_block_head(architecture, config, weights)
        block, n_candidates = architecture.block(config), architecture.n_candidates(config)
    else:
        fuser, graph = trace_head(architecture, config, weights)
    layers, n_embd = architecture.layers(config), model.config.n_embd
    if fuser.n_hidden != max(1, len(layers)) * n_embd:
        raise ModelFormatError(
            f"{file.path}: the {name} reads hidden states of {fuser.n_hidden // max(1, len(layers))} numbers, and "
            f"those of the model {model.name!r} have {n_embd}: it is the head of another model"
        )
    try:
        columns = model.pass_layer_inputs(layers)
    except InvalidRequestError as error:
        raise ModelFormatError(f"{file.path}: the {name} does not fit the model {model.name!r}: {error}") from error
    ids, view = architecture.ids(weights), LabelledFile(file, _HEAD)
    known = None
    if ids is not None:
        known = view.data(ids.weight.name).view("<i8").ravel().copy()
        if view.tensors[ids.weight.name].type != TensorType.I64 or known.min() < 0 or known.max() >= config.n_vocab:
            raise ModelFormatError(f"{file.path}: tensor {ids.weight.name.removeprefix(_HEAD)} has no ids of tokens")
    _warn_of_unread_keys(metadata, config.architecture)
    program = model.program.extended(graph, view)
    pool = model.kv_pool() if reads_cache else model.head_pool(program, identity(file))
    fuses = None if reads_cache else model.program.extended(fuser, view)
    injects, adds = (model.program.extended(part, view) if part else None for part in (injector, biases))
    return Head(
        name, model, lambda: program, pool, fuses, tuple(columns), known, injects, block, adds, n_candidates,
        reads_cache=reads_cache,
    )  # fmt: skip


def _share_weights(model: Model, weights: Weights, config: Config, head: str) -> None:
    """Give a head the model's embeddings and output layer for missing ones."""
    graph = model.program.graph
    embedding = graph.embedding
    output = next(op.matrices()[0] for op in graph.ops if op.matrices() and graph.hidden in op.inputs())
    shared = {"token_embd": embedding.table if embedding else None, "output": output}
    for name, tensor in shared.items():
        if getattr(weights, name) is not None:
            continue
        if tensor is None or tensor.shape[-1] != config.n_embd:
            width = "none" if tensor is None else f"{tensor.shape[-1]}"
            raise ModelFormatError(
                f"{head} has no {name}.weight of its own and states of {config.n_embd} numbers; that of the model "
                f"{model.name!r} has {width}"
            )
        weights.share(name, Param(tensor))


def _load_media(
    path: Path,
    mmproj: str | os.PathLike[str] | None,
    threads: int | None,
    engine: Engine | None,
    model: Model,
) -> LoadedEncoder | None:
    """Load the encoder of pictures of a model, None without one.

    `path` is the model's file, `mmproj` the encoder's, by default one of the same folder. Raises ModelFormatError if
    the encoder is of another model, and if several fit.
    """
    from llamacli.media.encoder import compile_encoder, find_mmproj, projector_of

    n_embd = model.config.n_embd
    found = find_mmproj(path, n_embd) if mmproj is None else open_model_file(mmproj, [])
    if found is None:
        return None
    with contextlib.closing(found) as file:
        encoder = model._plugins.media_encoder(projector_of(file.metadata))
        loaded = compile_encoder(encoder, file, model.mode, engine or default_engine(threads))
        unread = unread_keys(file.metadata, "clip")
    if loaded.n_embd != model.program.graph.embedding_width:
        loaded.close()
        raise ModelFormatError(
            f"{file.path}: the encoder {loaded.name!r} makes embeddings of {loaded.n_embd} numbers, and the model "
            f"{model.name!r} has embeddings of {model.program.graph.embedding_width}: it is the encoder of another "
            "model"
        )
    if unread:
        _log.warning("%s: metadata keys that the encoder does not use: %s", file.path, ", ".join(unread))
    return loaded


def _lora(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], scales: float | Sequence[float]
) -> list[tuple[str | os.PathLike[str], float]]:
    expect_type(paths, (str, os.PathLike, list, tuple), "lora_path", "a path or a list of paths")
    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    given = [*scales] if isinstance(scales, list | tuple) else [scales] * len(files)
    if len(files) != len(given):
        raise InvalidRequestError(f"lora_scale has {len(given)} numbers for {len(files)} files of lora_path")
    return [(file, checked_scale(one, f"lora_scale of {file}")) for file, one in zip(files, given, strict=True)]


def _resolve(plugins: Plugins, file: ModelFile) -> Architecture:
    """Architecture of a file; the error for unknown ones lists its parts."""
    try:
        return plugins.resolve(file.metadata)
    except UnknownArchitectureError as error:
        if file.metadata.get("general.architecture") == "clip":
            raise ModelFormatError(
                f"{file.path}: it is a mmproj file, the encoder of pictures of a model: give the model's own file, and "
                "this one by `mmproj`"
            ) from error
        shapes = {name: info.shape for name, info in file.tensors.items()}
        raise UnknownArchitectureError(f"{error}; {describe_parts(file.metadata, shapes)}") from error


def need_of(path: str | os.PathLike[str], plugins: Plugins, mode: QuantMode = QuantMode.AUTO) -> Need:
    """Memory that a model file will need; no weights are read.

    Raises what `load_model` raises for a file that cannot be read or is of no known architecture.
    """
    file = open_model_file(path, plugins.loaders())
    try:
        architecture = _resolve(plugins, file)
        with plugin_errors(f"architecture {architecture.name!r}"):
            config = architecture.configure(file.metadata)
            graph = trace(architecture, config, architecture.tensors(config).bind(file))
        return Need.of(graph, file, mode)
    finally:
        file.close()


def load_tokenizer(path: str | os.PathLike[str], *, plugins: Plugins | None = None) -> Tokenizer:
    """Load the tokenizer of a model file, or of a vocabulary-only file.

    Raises ModelFormatError if the file is unreadable or malformed, TokenizerError if its scheme is unknown.
    """
    plugins = plugins or installed_plugins()
    file = open_model_file(path, plugins.loaders())
    try:
        architecture = plugins.resolve(file.metadata) if "general.architecture" in file.metadata else None
    except UnknownArchitectureError:
        architecture = None  # without its plugin, what is special about a family is unknown
    finally:
        file.close()
    return _tokenizer_of(file.metadata, architecture)


def _named(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    if not isinstance(path, str) or not path or os.path.exists(path):
        return path
    from llamacli.hub.names import resolve  # names and the hub cost a start some milliseconds

    return resolve(path)


def _tokenizer_of(metadata: Metadata, architecture: Architecture | None) -> Tokenizer:
    if architecture is None:
        return tokenizer_from_metadata(metadata)
    part = f"architecture {architecture.name!r}"

    def guarded(strips: Callable[[Metadata, str], bool], special: str) -> bool:
        with plugin_errors(part):
            return strips(metadata, special)

    after, before = partial(guarded, architecture.strips_after), partial(guarded, architecture.strips_before)
    return tokenizer_from_metadata(metadata, after, before)


def _check_vocabulary(file: ModelFile, config: Config, tokenizer: Tokenizer) -> None:
    if tokenizer.n_vocab != config.n_vocab:
        raise ModelFormatError(
            f"{file.path}: the tokenizer has {tokenizer.n_vocab} tokens and the model {config.n_vocab}"
        )


def _check_all_read(file: ModelFile, graph: Graph, unused: set[str]) -> None:
    """Refuse tensors that no op reads: they would be ignored silently."""
    read = {tensor.name for op in graph.ops for tensor in op.tensors()} | unused
    unread = [name for name in file.tensors if name not in read]
    if unread:
        raise PluginError(f"{file.path}: the architecture's forward pass leaves out {', '.join(unread)}")


def _expect_read(metadata: Metadata, overridden: Sequence[str]) -> None:
    for key in overridden:
        if key not in metadata.consumed and not key.startswith(_READ_LATER):
            similar = difflib.get_close_matches(key, metadata.consumed, 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise InvalidRequestError(f"override of {key}: the model does not read it{hint}")


def _warn_of_unread_keys(metadata: Metadata, architecture: str) -> None:
    """Log unread keys of the architecture, perhaps of an unsupported variant."""
    if unread := unread_keys(metadata, architecture):
        _log.warning("%s: metadata keys that the architecture does not use: %s", metadata.source, ", ".join(unread))


def unread_keys(metadata: Metadata, architecture: str) -> list[str]:
    """Keys of the architecture that nothing has read so far."""
    known = metadata.consumed | {f"{architecture}.pooling_type"}  # it matters after the forward pass
    return sorted(key for key in metadata if key.startswith(f"{architecture}.") and key not in known)
