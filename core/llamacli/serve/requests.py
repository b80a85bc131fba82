"""Requests, events and the interface between the HTTP layer and the engine.

Plain messages: the engine may run in another thread, or in another process. A request's text is a function of its
fields and of the model; of nothing else that runs, of no timing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.chat.calls import Tools
from llamacli.chat.logprobs import TokenLogprob as TokenLogprob
from llamacli.chat.messages import ToolCall
from llamacli.chat.syntax import Syntax
from llamacli.inputs import Contents
from llamacli.media.encoder import Tile
from llamacli.sampling import SamplerChain, SamplingParams
from llamacli.serve.errors import ServeError

if TYPE_CHECKING:
    from llamacli.model import Model
    from llamacli.serve.metrics import EngineStats
    from llamacli.tools.embedding import Pooling

Ids = tuple[int, ...]
AdapterScales = tuple[tuple[int, float], ...]
"""Ids of LoRA adapters, with a scale each."""

GREEDY = SamplingParams()

FinishReason = Literal["stop", "length", "tool_calls"]


@attrs.frozen(kw_only=True)
class ReplyFormat:
    """Format of a chat reply: its ends and its syntax.

    - `syntax`, `prompt`, `tools`: the reader of the reply is `syntax.reader(prompt, tools=tools)`, with `prompt` the
      rendered text and `tools` the request's.
    - `begun`: text of the reply that follows the rendered text in the prompt.
    - `markers`: special tokens that the reader sees as text.
    - `end_ids`: tokens that end the reply besides the file's own.
    - `end_text`: text that ends the reply, "" for none; `end_unless` begins with it, and does not.
    """

    syntax: Syntax
    prompt: str = ""
    begun: str = ""
    tools: Tools = attrs.field(default=False, hash=False)
    markers: Mapping[int, str] = attrs.field(factory=dict, hash=False)
    end_ids: frozenset[int] = frozenset()
    end_text: str = ""
    end_unless: str = ""


@attrs.frozen(kw_only=True)
class GenerationRequest:
    """Request of `n` texts after each of some prompts.

    Choice k of prompt i has the index i * n + k.

    - `id`: for the log.
    - `model`: name of the model.
    - `prompts`: token ids of each, at least one prompt of at least one token; negative numbers are content keys.
    - `contents`: the embeddings of the content keys; None if all are ids.
    - `tiles`: tiles of pictures by content key, each with the index of the row: the scheduler encodes a
      tile that is in no cache, in the place of the rows in `contents`.
    - `params`: sampling parameters. Give a grammar as a chain that a pool's thread has built
      (`llamacli.sampling.build_chain`), because `Engine.submit` builds other chains at once. `n_probs` above 0 asks
      for the tokens in `TextDelta`.
    - `seed`: of choice 0; others draw from seeds derived of it.
    - `max_tokens`: maximum tokens of each text, None for the rest of the context; 0 evaluates the prompt only.
    - `stop`: strings that end a text, and are not part of it. They are not searched in reasoning.
    - `min_indent`: least indentation of the lines after the first; a text ends before another line, with the reason
      "length".
    - `include_stop`: the stop string that ends a text is part of it.
    - `ignore_eos`: go on after end-of-generation tokens.
    - `end_ids`: tokens that end a text besides, with `ignore_eos` too.
    - `special_tokens`: special tokens are spelled in the text.
    - `max_seconds`: time after the prompts from which a text with a newline ends, with the reason "length"; None for no
      limit.
    - `reply`: format of a chat reply; None leaves the text whole.
    - `prompt_logprobs`: number of most probable tokens to report at each token of the prompts, None for no report.
    - `progress`: send `PromptProgress`. `timed`: send `TokenTimings`.
    - `key`: the API key, or another mark of a client: keys take turns.
    - `adapters`: ids of LoRA adapters of the model, with their scales; others are not applied.
    - `slot`: number under which the text can be saved, restored and erased, None for none.
    - `draft_max`: maximum length of drafts where the server drafts, 0 for none, None for the server's.
    - `prediction`: token ids of the text that is expected. It is the source of its drafts, in place of the server's.
    - `background`: it gives way to requests that are not, has no limits of the queue, and waits without one of time.
    """

    id: str
    model: str
    prompts: tuple[Ids, ...]
    contents: Contents | None = attrs.field(default=None, eq=False)
    tiles: Mapping[int, tuple[Tile, int]] = attrs.field(factory=dict, eq=False, repr=False)
    params: SamplingParams | SamplerChain = GREEDY
    seed: int = 0
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    min_indent: int = 0
    include_stop: bool = False
    ignore_eos: bool = False
    end_ids: Ids = ()
    special_tokens: bool = False
    max_seconds: float | None = None
    reply: ReplyFormat | None = None
    prompt_logprobs: int | None = None
    progress: bool = False
    timed: bool = False
    key: str = ""
    adapters: AdapterScales = ()
    draft_max: int | None = None
    prediction: Ids = ()
    slot: int | None = None
    background: bool = False


@attrs.frozen(kw_only=True)
class EmbeddingRequest:
    """Request of embeddings; fields as in GenerationRequest.

    - `pooling`: pooling of token vectors, None for the model's; "rank" asks for the scores of a classifier head.
    - `normalize`: scale vectors to length 1.
    """

    id: str
    model: str
    prompts: tuple[Ids, ...]
    contents: Contents | None = attrs.field(default=None, eq=False)
    tiles: Mapping[int, tuple[Tile, int]] = attrs.field(factory=dict, eq=False, repr=False)
    key: str = ""
    adapters: AdapterScales = ()
    pooling: Pooling | None = None
    normalize: bool = True
    background: bool = False


Request = GenerationRequest | EmbeddingRequest


# --- events


@attrs.frozen
class Admitted:
    """First event of a request: it has left the queue.

    `queue_s`: seconds in the queue.
    """

    queue_s: float


@attrs.frozen
class PromptProgress:
    """Progress of the prompts of a request, in tokens.

    Of `total` tokens, `cached` came from the prefix cache and `processed` are done, cached ones too, after `seconds`.
    The first comes before anything is evaluated.
    """

    total: int
    cached: int
    processed: int
    seconds: float


@attrs.frozen
class TextDelta:
    """Text of a choice that follows the text sent before.

    Characters and stop strings that are not certain yet are held back. `tokens`, where `n_probs` asks for them, begin
    in the text; tokens without text follow at the reply's end. Reasoning has none, nor have the
    markers, white space and calls that are not part of a reply's text.
    """

    index: int
    text: str
    reasoning: bool = False
    tokens: tuple[TokenLogprob, ...] = ()


@attrs.frozen
class ArgumentsDelta:
    """Text of the arguments of tool call `number`, in JSON.

    It follows the text sent before. The first of a call may be empty. They join to the arguments of the `ToolCallDelta`
    that follows.
    """

    index: int
    number: int
    name: str
    text: str


@attrs.frozen
class ToolCallDelta:
    """Complete tool call of a choice, its `number` counted from 0."""

    index: int
    number: int
    call: ToolCall


@attrs.frozen
class PromptLogprobs:
    """Log-probabilities of the tokens of prompt `prompt`."""

    prompt: int
    tokens: tuple[TokenLogprob, ...]


@attrs.frozen
class Embedding:
    """Vector of prompt `prompt`, float32 [n_embd].

    Without pooling float32 [n_tokens, n_embd], of the pooling rank the scores of the classes, float32 [n_classes].
    """

    prompt: int
    vector: npt.NDArray[np.float32] = attrs.field(eq=False)


@attrs.frozen
class Finished:
    """End of a choice.

    `stop_string` is the stop string that ended it, `timed_out` is true where a time limit did.
    """

    index: int
    reason: FinishReason
    stop_string: str | None = None
    timed_out: bool = False


@attrs.frozen
class Usage:
    """Numbers of tokens of a request.

    - `prompt`, `cached`: tokens of prompts; the part of them that came from the cache.
    - `generated`, `reasoning`: generated tokens; the part of them that is reasoning.
    - `drafted`, `accepted`: tokens of speculative decoding; the part of them that was accepted.
    - `predicted`: true if they are of the request's prediction.
    """

    prompt: int
    cached: int = 0
    generated: int = 0
    reasoning: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted: bool = False


@attrs.frozen
class Timings:
    """Times of a request, in seconds.

    In the queue, in its prompts, in generation. `n_preempted`: how often it gave way to others.
    """

    queue_s: float
    prompt_s: float
    generate_s: float
    n_preempted: int = 0


@attrs.frozen
class TokenTimings:
    """Numbers and times of a request so far, before a token's text."""

    usage: Usage
    timings: Timings


@attrs.frozen
class Done:
    """Last event of a request that has succeeded."""

    usage: Usage
    timings: Timings


@attrs.frozen
class Failed:
    """Last event of a request that has not."""

    error: ServeError


Event = (
    Admitted
    | PromptProgress
    | TokenTimings
    | TextDelta
    | ArgumentsDelta
    | ToolCallDelta
    | PromptLogprobs
    | Embedding
    | Finished
    | Done
    | Failed
)


# --- interface


class Stream(Protocol):
    """Events of one request, to be iterated once.

    The first is `Admitted` or `Failed`, the last `Done` or `Failed`. Events that the reader has not taken are merged:
    text of a choice is joined, of progress only the last remains, so memory stays within the size of the texts.
    Closing it early needs `cancel`, best in a `finally`.
    """

    @property
    def id(self) -> str:
        """The request's id."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """The events; waits for new ones."""

    def cancel(self) -> None:
        """End the request at the next step; no event follows.

        Cancelling twice, or after the end, does nothing.
        """

    def end_reasoning(self) -> bool:
        """End the reasoning of its texts at their next tokens.

        Their parameters must have a budget for it. False after the end, and for an engine that cannot do this.
        """


@attrs.frozen
class AdapterInfo:
    """LoRA adapter of a model.

    Its file, and the scale for requests that name none.
    """

    id: int
    path: str
    scale: float


@attrs.frozen
class Preset:
    """Defaults of a model for requests that give none.

    - `system`: system message; `template`: chat template. "" for none.
    - `sampling`: sampling parameters by name. `stop`: strings that end a text.
    - `seed`, `max_tokens`: None for none.
    """

    system: str = ""
    template: str = ""
    sampling: Mapping[str, float] = attrs.field(factory=dict, hash=False)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None


@attrs.frozen
class ModelSource:
    """Model file that the server offers under a name, and under aliases.

    `adapters` are files of LoRA adapters, with their scales; `draft` is the file of a draft model, or `MTP` for the
    model's own multi-token-prediction head. `mmproj` is the file of the encoder of pictures, None for the one beside
    the model. `preset` are defaults of its requests.

    - `n_ctx`, `kv_memory`, `keep_alive`: None for the server's settings.
    - `pinned`: it stays loaded. `stamp`: changes with the file, for sources that are read again.
    - `tags`: words about the model, for clients.
    - `is_fixed`: False for a model of a folder, presets or the catalogue, which may change or go.
    """

    name: str
    path: Path
    aliases: tuple[str, ...] = ()
    adapters: tuple[tuple[Path, float], ...] = ()
    draft: Path | Literal["mtp"] | None = None
    mmproj: Path | None = None
    preset: Preset | None = None
    n_ctx: int | None = None
    kv_memory: int | None = None
    keep_alive: float | None = None
    pinned: bool = False
    is_fixed: bool = True
    stamp: str = ""
    tags: tuple[str, ...] = ()


ModelStatus = Literal["unloaded", "sleeping", "loading", "loaded"]


@attrs.frozen
class ModelInfo:
    """Description of a model; None where unknown before it is loaded.

    - `name`: the served name; `aliases`: other names for it. `tags`: words about it.
    - `path`: its file.
    - `status`: it can run at once ("loaded"), is being loaded, was unloaded because nobody used it ("sleeping"), or is
      not loaded for another reason. `failure`: the error of its last load, "" if that succeeded.
    - `created`: time of the file's last change, in seconds since 1970.
    - `n_ctx`: tokens of a context; `n_ctx_train`: the length that it was trained for.
    - `n_params`, `n_bytes`: parameters, and bytes of the file, of the encoder's file too once that is loaded.
    - `architecture`: `general.architecture`; `file_type`: llama.cpp's name of its types, as in Q4_K_M; "" if unknown.
    - `fingerprint`: digest of all that texts depend on, for `system_fingerprint` of the OpenAI API.
    - `embeds`: true if it answers EmbeddingRequest. `pooling`: pooling of such requests that name none.
    - `ranks`: true if it has a classifier head, whose classes are `labels`. `normalized`: its scores are probabilities.
    - `sees`, `hears`: true if it reads pictures, or sound.
    - `adapters`: its LoRA adapters by id. `preset`: defaults of requests, None for the server's alone.
    """

    name: str
    path: str
    status: ModelStatus
    created: int
    aliases: tuple[str, ...] = ()
    n_ctx: int | None = None
    n_ctx_train: int | None = None
    n_vocab: int | None = None
    n_embd: int | None = None
    n_params: int | None = None
    n_bytes: int = 0
    architecture: str = ""
    file_type: str = ""
    fingerprint: str = ""
    embeds: bool = False
    pooling: Pooling | None = None
    ranks: bool = False
    labels: tuple[str, ...] = ()
    normalized: bool = False
    sees: bool = False
    hears: bool = False
    adapters: tuple[AdapterInfo, ...] = ()
    preset: Preset | None = None
    failure: str = ""
    tags: tuple[str, ...] = ()

    @property
    def loaded(self) -> bool:
        """True if it can run at once."""
        return self.status == "loaded"

    @property
    def adapter_scales(self) -> AdapterScales:
        """Adapters of requests that name none."""
        return tuple((adapter.id, adapter.scale) for adapter in self.adapters)


class Pin(Protocol):
    """Loaded model that is not unloaded before `release`."""

    @property
    def model(self) -> Model:
        """The model, for its tokenizer and templates."""

    def release(self) -> None:
        """Allow the model to be unloaded; a second call does nothing."""


class Slots(Protocol):
    """Texts under numbers, whose cached states are files; `llamacli.serve.slots.Slots` implements it."""

    def save(self, slot: int, path: Path) -> tuple[int, int]:
        """Write the cached state of a slot.

        Returns the number of its tokens, and of the bytes of the file. Raises BadRequestError, OSError.
        """

    def restore(self, slot: int, path: Path) -> tuple[int, int]:
        """Read a state into the prefix cache, as a slot's text.

        Returns the number of its tokens, and of the bytes of the file. Raises BadRequestError, OSError.
        """

    def erase(self, slot: int) -> int:
        """Forget a slot, and evict the cells of its text.

        Returns the number of its tokens.
        """


class Engine(Protocol):
    """Interface of the engine, for the thread of an event loop.

    No call waits for a step of the engine.
    """

    def models(self) -> tuple[ModelInfo, ...]:
        """Models by name, loaded or not."""

    async def pin(self, name: str) -> Pin:
        """Load a model, and keep it loaded until the pin is released.

        Raises UnknownModelError, LoadingError if that takes longer than the server's limit.
        """

    def add(self, source: ModelSource) -> None:
        """Offer a model from now on.

        It replaces a model of the same name that was added before.
        Raises InvalidRequestError for the name of a model of the start, NotSupportedError for an engine that has
        one model.
        """

    def offer(self, sources: Sequence[ModelSource]) -> None:
        """Offer these models beside the models of the start, and no others.

        A model that has changed is loaded anew by the next request for it. Raises NotSupportedError as `add` does.
        """

    def remove(self, name: str) -> None:
        """Offer a model that was added no longer.

        Its requests that run or wait go on.
        Raises UnknownModelError, InvalidRequestError for a model of the start.
        """

    def unload(self, name: str) -> None:
        """Unload a model at the next step, unless it is in use.

        Raises UnknownModelError.
        """

    def keep_alive(self, name: str, seconds: float | None) -> None:
        """Set the time after which a model that nobody uses is unloaded.

        None is the server's setting, below 0 never. Raises UnknownModelError.
        """

    def set_adapters(self, name: str, scales: AdapterScales) -> None:
        """Set the scales of a model's LoRA adapters, for later requests.

        Adapters that are not listed get the scale 0. Raises UnknownModelError, InvalidRequestError for an unknown id.
        """

    def slots(self, name: str) -> Slots:
        """Slots of a loaded model.

        Raises UnknownModelError, LoadingError if it is not loaded, NotSupportedError for an engine without.
        """

    def expect_room(self) -> None:
        """Raise QueueFullError if `submit` would, whatever the request is.

        Much cheaper than making the request first. Without an error `submit` may refuse it all the same.
        """

    def submit(self, request: Request) -> Stream:
        """Enqueue a request; its model stays loaded until it ends.

        Raises, with nothing changed: UnknownModelError, LoadingError, PromptTooLongError, QueueFullError,
        ShuttingDownError, NotSupportedError, and InvalidRequestError for a value that the model does not allow.
        """

    def stats(self) -> EngineStats:
        """Numbers for `/metrics`, `/health` and `/slots`."""

    async def drain(self, timeout: float) -> None:
        """Shut down: refuse new requests, and fail waiting ones.

        Running ones have `timeout` seconds to end, and then fail with ShuttingDownError. A
        second call with a shorter limit shortens it.
        """

    def close(self) -> None:
        """End all requests and the engine's thread, and free the models.

        Waits for the present step.
        """
