"""`Llama` with llama-cpp-python's methods, arguments and results.

    from llamacli.compat.llama_cpp import Llama

`install()` makes `import llama_cpp` find this module, for libraries that import it themselves, such as LangChain.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from llamacli.chat.completions import CompletionArguments, chat_completion, completion, whole
from llamacli.chat.functions import described
from llamacli.chat.openai import usage
from llamacli.errors import InvalidRequestError
from llamacli.kv import KV_TYPES
from llamacli.kv.prefixes import n_common
from llamacli.model import Model, load_model, load_tokenizer
from llamacli.sampling import SamplingParams
from llamacli.session import Session
from llamacli.tools.embedding import Embedder, Pooling, load_embedder, pooling_of

__all__ = [
    "Llama", "LlamaCache", "LlamaDiskCache", "LlamaGrammar", "LlamaRAMCache", "LlamaState", "LogitsProcessorList",
    "StoppingCriteriaList", "install",
]  # fmt: skip

LLAMA_DEFAULT_SEED = 0xFFFFFFFF
"""Seed that stands for a random one."""

_WITHOUT_EFFECT = frozenset(
    {
        "n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "use_mmap", "use_mlock", "n_batch", "n_ubatch",
        "n_threads_batch", "logits_all", "offload_kqv", "flash_attn", "op_offload", "swa_full", "no_perf",
        "last_n_tokens_size", "numa", "verbose", "spm_infill", "f16_kv", "n_parts", "low_vram", "mul_mat_q", "device",
    }
)  # fmt: skip
"""Arguments that change neither texts nor results here: batches, threads and memory are chosen automatically."""

_DEFAULTS = {
    "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1,
    "yarn_ext_factor": -1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_orig_ctx": 0,
    "lora_base": None, "chat_handler": None, "draft_model": None, "tokenizer": None,
}  # fmt: skip
_INSTEAD = {
    "chat_handler": "mmproj= of load_model is the encoder of pictures",
    "draft_model": "speculate= of create_completion takes a drafter",
    "lora_base": "adapters are applied to the model itself",
}
_GGML_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}


class LogitsProcessorList(list[Any]):
    """Functions that change logits, applied in order."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Logits after all functions."""
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[Any]):
    """Functions of which any ends the text."""

    def __call__(self, input_ids: Any, logits: Any) -> bool:
        """True if the text ends."""
        return any(criterion(input_ids, logits) for criterion in self)


class LlamaRAMCache:
    """Stand-in: prompts that begin alike share their KV cache without one."""

    def __init__(self, capacity_bytes: int = 2 << 30):
        self.capacity_bytes = capacity_bytes


LlamaCache = LlamaDiskCache = LlamaRAMCache


@attrs.frozen
class LlamaGrammar:
    """Grammar in GBNF, or a JSON Schema as JSON text."""

    grammar: str | None = None
    json_schema: str | None = None

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """Take a grammar in GBNF; it is checked when it is used."""
        return cls(grammar)

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """Read a grammar in GBNF. Raises OSError."""
        return cls(Path(file).read_text("utf-8"))

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """Take a JSON Schema. Raises InvalidRequestError if it is not JSON."""
        try:
            json.loads(json_schema)
        except ValueError as error:
            raise InvalidRequestError(f"json_schema: {error}") from None
        return cls(json_schema=json_schema)


@attrs.frozen
class LlamaState:
    """State of a `Llama`: its session and its random generator."""

    data: bytes
    random: Any


class Llama:
    """Model with one context, as llama-cpp-python's class of this name.

    Arguments are those of `llama_cpp.Llama`. Raises TypeError for an unknown one, InvalidRequestError for one that
    cannot be honoured, and what `llamacli.load_model` raises.
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_ctx: int = 512,
        seed: int = LLAMA_DEFAULT_SEED,
        n_threads: int | None = None,
        vocab_only: bool = False,
        embedding: bool = False,
        kv_overrides: Mapping[str, Any] | None = None,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        lora_path: str | None = None,
        lora_scale: float = 1.0,
        chat_format: str | None = None,
        type_k: int | None = None,
        type_v: int | None = None,
        **others: Any,
    ):
        for name, value in others.items():
            if name not in _WITHOUT_EFFECT and name not in _DEFAULTS:
                raise TypeError(f"Llama() has no argument {name!r}")
            if name in _DEFAULTS and value != _DEFAULTS[name]:
                raise InvalidRequestError(f"{name}: {_INSTEAD.get(name, 'kv_overrides sets keys of the model')}")
        self.model_path, self.chat_format, self.verbose = (
            str(model_path),
            chat_format,
            bool(others.get("verbose", True)),
        )
        self._model: Model | None = None
        self._session: Session | None = None
        self._embedder: Embedder | None = None
        overrides = dict(kv_overrides or {})
        if rope_freq_base:
            overrides["{arch}.rope.freq_base"] = float(rope_freq_base)
        if rope_freq_scale not in (0, 1):
            overrides |= {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 1 / rope_freq_scale}
        self.set_seed(seed)
        if vocab_only:
            self._tokenizer = load_tokenizer(model_path)
            return
        options: dict[str, Any] = {"threads": n_threads, "overrides": overrides or None}
        if embedding:
            self._embedder = load_embedder(model_path, **options)
            self._model = self._embedder.model
        else:
            adapters = () if lora_path is None else lora_path
            self._model = load_model(model_path, lora_path=adapters, lora_scale=lora_scale, **options)
        self._tokenizer, config = self._model.tokenizer, self._model.config
        if n_ctx:
            config.n_ctx = n_ctx
        kinds = [_cache_type("type_k", type_k), _cache_type("type_v", type_v)]
        self._kv_type: Any = None if kinds == [None, None] else tuple(kind or "f16" for kind in kinds)
        if not embedding:
            self._session = self._model.create_session(kv_type=self._kv_type)

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: str | None = None, **options: Any) -> Llama:
        """Load a model of the Hugging Face hub, downloaded unless cached.

        `filename` may begin with `*`, as in `*Q4_K_M.gguf`. Raises HubError.
        """
        part = (filename or "").removesuffix(".gguf").strip("*").strip("-._")
        return cls(f"hf.co/{repo_id}" + (f":{part}" if part else ""), **options)

    # --- tokens

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text in UTF-8."""
        decoded = text.decode("utf-8", "replace")
        if add_bos:
            return self._tokenizer.encode_prompt(decoded, special)
        return self._tokenizer.encode(decoded, False, special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Text of token ids, in UTF-8."""
        pieces = b"".join(self._tokenizer.piece_bytes(token, special) for token in tokens)
        begins = not prev_tokens and self._tokenizer.bos_id is not None and list(tokens[:1]) == [self._tokenizer.bos_id]
        return pieces.removeprefix(b" ") if begins else pieces

    def token_bos(self) -> int:
        """Id of the token at the beginning, -1 if there is none."""
        return _id(self._tokenizer.bos_id)

    def token_eos(self) -> int:
        """Id of the token at the end, -1 if there is none."""
        return _id(self._tokenizer.eos_id)

    def token_nl(self) -> int:
        """Id of the token of a newline, -1 if there is none."""
        ids = self._tokenizer.encode("\n", False)
        return ids[-1] if ids else -1

    # --- sizes

    def n_ctx(self) -> int:
        """Size of the context in tokens."""
        return self._loaded.config.n_ctx

    @property
    def context_params(self) -> SimpleNamespace:
        """Size of the context, as LlamaIndex reads it."""
        return SimpleNamespace(n_ctx=self.n_ctx())

    def n_vocab(self) -> int:
        """Number of tokens of the vocabulary."""
        return self._tokenizer.n_vocab

    def n_embd(self) -> int:
        """Width of embeddings."""
        return self._loaded.config.n_embd

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the file, as text; without arrays."""
        metadata = self._loaded.metadata
        values = {key: metadata.peek(key) for key in metadata}
        return {key: str(value) for key, value in values.items() if isinstance(value, str | int | float | bool)}

    # --- the context

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the context."""
        return self._context.n_past

    @property
    def eval_tokens(self) -> list[int]:
        """Tokens in the context."""
        return list(self._context.tokens)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens behind those in the context."""
        self._context.eval(list(tokens))

    def sample(self, **arguments: Any) -> int:
        """Draw the next token; arguments are llama-cpp-python's."""
        return self._context.sample(_params(arguments))

    def generate(
        self, tokens: Sequence[int], *, reset: bool = True, stopping_criteria: Any = None, **arguments: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens behind a prompt without an end.

        What the context has in common with the prompt is kept. Tokens that are sent to the generator are evaluated
        behind the one that it yielded last.
        """
        session, params = self._context, _params(arguments)
        wanted = list(tokens)
        if reset:
            session.rewind(n_common(session.tokens, wanted[:-1]))
            wanted = wanted[session.n_past :]
        while True:
            session.eval(wanted)
            token = session.sample(params)
            if stopping_criteria is not None and stopping_criteria([*session.tokens, token], session.logits):
                return
            session.accept(token)
            sent = yield token
            wanted = [token, *(sent or ())]

    def reset(self) -> None:
        """Empty the context."""
        self._context.rewind(0)

    def set_seed(self, seed: int) -> None:
        """Set the seed of the seeds of completions."""
        self._random = random.Random(secrets.randbits(63) if seed in (LLAMA_DEFAULT_SEED, -1) else seed)

    def set_cache(self, cache: object) -> None:
        """Accept a cache: prefixes are shared without one."""

    def save_state(self) -> LlamaState:
        """State of context and random generator."""
        return LlamaState(self._context.save_state(), self._random.getstate())

    def load_state(self, state: LlamaState) -> None:
        """Restore a state. Raises StateError for that of another model."""
        self._context.load_state(state.data)
        self._random.setstate(state.random)

    # --- completions

    def create_completion(self, prompt: str | Sequence[int], *, stream: bool = False, **arguments: Any) -> Any:
        """Continue a prompt; see `llamacli.Model.create_completion`."""
        own = {name: arguments.pop(name) for name in ("suffix", "max_tokens", "echo", "logprobs") if name in arguments}
        model = self._loaded
        chunks = completion(model, model.metadata, prompt, self._arguments(arguments, 0.8), **own)
        return chunks if stream else whole(chunks)

    __call__ = create_completion

    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False, **arguments: Any
    ) -> Any:
        """Reply to a conversation; see `llamacli.Model.create_chat_completion`."""
        if arguments.pop("function_call", None) is not None:
            raise InvalidRequestError("function_call: tool_choice takes its place")
        if functions := arguments.pop("functions", None):
            arguments["tools"] = [{"type": "function", "function": function} for function in functions]
        shared = attrs.fields_dict(CompletionArguments).keys() | {"tfs_z"}
        own = {name: arguments.pop(name) for name in list(arguments) if name not in shared}
        tools, _ = described(own.pop("tools", None))
        model = self._loaded
        codec = model.create_chat_codec(self.chat_format, tools=bool(tools))
        shared_arguments = self._arguments(arguments, 0.2)
        chunks = chat_completion(model, model.metadata, codec, messages, shared_arguments, tools=tools, **own)
        return chunks if stream else whole(chunks)

    def _arguments(self, given: dict[str, Any], temperature: float) -> CompletionArguments:
        if given.pop("tfs_z", 1.0) != 1.0:
            raise InvalidRequestError("tfs_z: llama.cpp no longer has tail-free sampling, nor has this program")
        grammar = given.pop("grammar", None)
        if isinstance(grammar, LlamaGrammar):
            if grammar.json_schema is not None:
                given["json_schema"] = json.loads(grammar.json_schema)
            grammar = grammar.grammar
        if given.get("seed") is None:
            given["seed"] = self._random.getrandbits(63)
        defaults = {"temperature": temperature, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}
        return CompletionArguments(**defaults | {"grammar": grammar, **given})

    # --- embeddings

    def embed(
        self,
        input: str | Sequence[str],  # noqa: A002 - llama-cpp-python's name
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """Embedding of a text, or of each of several.

        Without pooling there is a vector for each token. With `truncate` a text that does not fit is cut at the end.
        With `return_count` the number of tokens is the second of two results.
        """
        if self._embedder is None:
            raise InvalidRequestError("the model was loaded without embedding=True")
        model, texts = self._embedder.model, [input] if isinstance(input, str) else list(input)
        by_token = pooling_of(model) is Pooling.NONE
        found, n_tokens = [], 0
        for text in texts:
            ids = model.tokenizer.encode(text)
            ids = ids[: model.config.n_ctx] if truncate else ids
            n_tokens += len(ids)
            found.append(self._embedder.embed(ids, normalize=normalize and not by_token).tolist())
        result = found[0] if isinstance(input, str) else found
        return (result, n_tokens) if return_count else result

    def create_embedding(
        self,
        input: str | Sequence[str],  # noqa: A002 - llama-cpp-python's name
        model: str | None = None,
    ) -> dict[str, Any]:
        """Embeddings in the form of OpenAI's API."""
        texts = [input] if isinstance(input, str) else list(input)
        vectors, n_tokens = self.embed(texts, return_count=True)
        data = [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)]
        counts = usage(n_tokens, 0)
        del counts["completion_tokens"]
        return {"object": "list", "data": data, "model": model or self.model_path, "usage": counts}

    # --- end

    def close(self) -> None:
        """Free the model's memory; closing twice does nothing."""
        for resource in (self._session, self._embedder, self._model):
            if resource is not None:
                resource.close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Llama {self._model!r}>"

    @property
    def _loaded(self) -> Model:
        if self._model is None:
            raise InvalidRequestError("the model was loaded with vocab_only=True")
        return self._model

    @property
    def _context(self) -> Session:
        if self._session is None:
            raise InvalidRequestError("the model was loaded with vocab_only=True or embedding=True: it has no context")
        return self._session


def install() -> None:
    """Make this module what `import llama_cpp` finds."""
    sys.modules["llama_cpp"] = sys.modules[__name__]


def _id(token: int | None) -> int:
    return -1 if token is None else token


def _cache_type(name: str, number: int | None) -> str | None:
    if number is None:
        return None
    kind = _GGML_TYPES.get(number)
    if kind not in KV_TYPES:
        raise InvalidRequestError(f"{name} {number} is not a type of cached keys and values: {', '.join(KV_TYPES)}")
    return kind


def _params(arguments: dict[str, Any]) -> SamplingParams:
    given = {"temp": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, **arguments}
    given["temperature"] = given.pop("temp")
    given["mirostat"] = given.pop("mirostat_mode", 0)
    grammar = given.pop("grammar", None)
    if isinstance(grammar, LlamaGrammar):
        given["grammar"], given["json_schema"] = grammar.grammar, grammar.json_schema
    for name in ("penalize_nl", "idx", "tfs_z"):
        given.pop(name, None)
    return SamplingParams(**given)
