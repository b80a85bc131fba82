"""Native endpoints of llama-server: completions, infill, embeddings, counts of tokens."""

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import attrs
import msgspec
import numpy as np
from msgspec import Meta

from llamacli.chat.logprobs import MIN_LOGPROB
from llamacli.errors import LlamaCliError
from llamacli.serve.errors import BadRequestError, NotSupportedError, ServeError
from llamacli.serve.http.call import Call
from llamacli.serve.http.errors import openai_body
from llamacli.serve.http.generation import Prepared, generation_settings, prepared, rendered, spelled
from llamacli.serve.http.openai.embeddings import pooled, seen_inputs
from llamacli.serve.http.openai.history import begin
from llamacli.serve.http.openai.responses import as_chat
from llamacli.serve.http.prompts import as_prompts, has_pictures
from llamacli.serve.http.replies import Choice, joined, llamacpp_progress, llamacpp_timings, progress_timings
from llamacli.serve.http.schemas.chat import ChatRequest
from llamacli.serve.http.schemas.common import MAX_SEED, MAX_SLOTS, sampling_struct
from llamacli.serve.http.schemas.completions import CompletionRequest, Prompt
from llamacli.serve.http.schemas.foreign import Foreign, Refused, Schema
from llamacli.serve.http.schemas.responses import ResponsesRequest
from llamacli.serve.http.sse import event
from llamacli.serve.requests import (
    Done,
    Event,
    Finished,
    PromptProgress,
    TextDelta,
    Timings,
    TokenLogprob,
    TokenTimings,
    Usage,
)
from llamacli.util.sampling_params import PARAMETERS

_ACTIONS = {"save": ("n_saved", "n_written"), "restore": ("n_restored", "n_read")}
_FILE_NAME = re.compile(r"[\w-][\w .-]{0,199}", re.ASCII)
_OWN = ("return_tokens", "response_fields", "post_sampling_probs", "n_indent")


class NativeRequest(CompletionRequest, kw_only=True):
    """Request of `/completion`.

    Without `n_predict` the text may fill the context. With `return_tokens` the response has the ids of its tokens;
    `response_fields` names the fields to return, with `/` between those of objects in others. With
    `post_sampling_probs`, `n_probs` reports the probabilities by which tokens were drawn, behind all samplers. A text
    ends before a line after its first that is indented less than `n_indent` characters. `ignore_eos` forbids the tokens
    that end it.
    """

    foreign: ClassVar[Foreign] = {name: why for name, why in CompletionRequest.foreign.items() if name not in _OWN}

    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=256)] | None = None
    post_sampling_probs: bool | None = None
    n_indent: Annotated[int, Meta(ge=0, le=1000)] | None = None


class InfillExtra(Schema, kw_only=True):
    """File, or a part of one, beside the text to infill."""

    foreign: ClassVar[Foreign] = {"time": "only its order counts"}

    text: str
    filename: str = "tmp"


class InfillRequest(NativeRequest, kw_only=True):
    """Request of `/infill`.

    The text comes after `input_prefix` and `prompt`, and before `input_suffix`. Of `input_extra` the last tokens are
    read for which the context has room.
    """

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InfillExtra], Meta(max_length=1000)] | None = None
    prompt: str = ""


class NativeEmbeddings(Schema, kw_only=True):
    """Request of `/embedding`; `input` is another name of `content`.

    `embd_normalize`: 2 scales vectors to length 1, -1 leaves them as they are. Without pooling (`--pooling none`) each
    text has a vector for each token, as it is.
    """

    foreign: ClassVar[Foreign] = {"encoding_format": Refused("/v1/embeddings has it", ("float",))}

    content: Prompt | None = None
    input: Prompt | None = None
    model: str | None = None
    embd_normalize: Literal[-1, 2] | None = None


class SlotFile(Schema, kw_only=True):
    """Request of `/slots/N?action=save`: name of a file."""

    filename: str


class DefaultParams(sampling_struct(*PARAMETERS), Schema, kw_only=True):  # type: ignore[misc]
    """Request of `POST /props`: parameters of requests that give none.

    -1 is a random seed, and no limit.
    """

    seed: Annotated[int, Meta(ge=-1, le=MAX_SEED)] | None = None
    max_tokens: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None


class Control(Schema, kw_only=True):
    """Request of `/v1/chat/completions/control`: a command to a running reply, by its id."""

    id: str
    action: Literal["reasoning_end"]
    model: str | None = None


async def control(call: Call, request: Control) -> None:
    """End the reasoning of a running reply with `reasoning_control`."""
    stream = call.server.controlled.get((call.owner, request.id.removeprefix("chatcmpl-")))
    if stream is not None and stream.end_reasoning():
        await call.respond({"success": True})
        return
    await call.respond({"success": False, "message": "no reply with reasoning_control runs under this id"})


async def completion(call: Call, request: NativeRequest) -> None:
    """Continue texts, whole or as a stream."""
    if request.n_predict is None and request.max_tokens is None and call.settings.max_tokens is None:
        request.n_predict = -1
    request.parse_special = request.parse_special is not False
    if request.ignore_eos:
        _, model = await call.model(request.model)
        given, ends = request.logit_bias or {}, sorted(model.tokenizer.eog_ids)
        if isinstance(given, Mapping):
            request.logit_bias = {**given, **{str(token): False for token in ends}}
        else:
            request.logit_bias = [*given, *((token, False) for token in ends)]
    await _answer(call, request)


async def infill(call: Call, request: InfillRequest) -> None:
    """Text between a prefix and a suffix, with other files before."""
    info, model = await call.model(request.model)
    if model.tokenizer.infill_ids is None:
        raise NotSupportedError("this model's vocabulary has no tokens for fill-in-the-middle")
    n_ctx = info.n_ctx or model.config.n_ctx
    room = n_ctx - max(1, request.n_predict or 0)
    files = [(one.filename, one.text) for one in request.input_extra or ()]
    texts = (request.input_prefix + request.prompt, request.input_suffix)
    ids = await call.compute(model.tokenizer.encode_infill, *texts, files, room)
    fields = {name: getattr(request, name) for name in NativeRequest.__struct_fields__} | {"prompt": ids}
    await completion(call, NativeRequest(**fields))


async def embedding(call: Call, request: NativeEmbeddings) -> None:
    """Vectors of texts, as a list."""
    given = request.input if request.content is None else request.content
    if given is None:
        raise BadRequestError("content: it is required", "content", "missing_required_parameter")
    info, model = await call.model(request.model)
    scaled = request.embd_normalize != -1 and info.pooling != "none"
    reply = await pooled(call, info, *await seen_inputs(call, given, model, info), normalize=scaled)
    await call.respond(
        [{"index": i, "embedding": np.atleast_2d(reply.vectors[i]).tolist()} for i in sorted(reply.vectors)]
    )


async def chat_tokens(call: Call, request: ChatRequest) -> None:
    """Number of tokens of a chat request's prompt."""
    info, model = await call.model(request.model)
    prompt = await rendered(call, request, info, model, fits=False)
    await call.respond({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def response_tokens(call: Call, request: ResponsesRequest) -> None:
    """Number of tokens of the prompt of a response."""
    await chat_tokens(call, as_chat((await begin(call, request)).whole))


async def set_props(call: Call, given: DefaultParams) -> None:
    """Change the defaults of later requests.

    Off unless `--props` is given.
    """
    if not call.settings.props:
        raise NotSupportedError("this server's properties cannot be changed; start it with --props")
    settings = call.settings
    sampling = {name: value for name in PARAMETERS if (value := getattr(given, name)) is not None}
    changed: dict[str, Any] = {"sampling": {**settings.sampling, **sampling}}
    if given.seed is not None:
        changed["seed"] = given.seed if given.seed >= 0 else None
    if given.max_tokens is not None:
        changed["max_tokens"] = given.max_tokens if given.max_tokens >= 0 else None
    call.server.settings = attrs.evolve(settings, **changed)
    await call.respond({"success": True})


async def slot_action(call: Call) -> None:
    """Save, restore or erase the cached text of a slot.

    Off unless `--slot-save-path` is given.
    """
    folder, number = call.settings.slot_folder, call.path_params["id"]
    if folder is None:
        raise NotSupportedError("this server does not save slots; start it with --slot-save-path")
    if not number.isascii() or not number.isdecimal() or int(number[:9]) >= MAX_SLOTS:
        raise BadRequestError(f"slot {number!a} is not a number below {MAX_SLOTS}", "id_slot")
    slot, action = int(number), call.query.get("action")
    if action not in (*_ACTIONS, "erase"):
        raise BadRequestError(f"action is {action!a}; it must be save, restore or erase", "action")
    name = "" if action == "erase" else (await call.body(SlotFile)).filename
    info, _ = await call.model(call.wanted_model)
    slots = call.server.engine.slots(info.name)
    if action == "erase":
        await call.respond({"id_slot": slot, "n_erased": await call.server.run(slots.erase, slot)})
        return
    if not _FILE_NAME.fullmatch(name):
        raise BadRequestError("filename: give the plain name of a file, such as chat.bin", "filename")
    if (folder / name).is_symlink():
        raise BadRequestError(f"filename: {name} is a link", "filename")
    started = time.perf_counter()
    try:
        n_tokens, n_bytes = await call.server.run(getattr(slots, action), slot, folder / name)
    except (OSError, LlamaCliError) as error:
        if isinstance(error, ServeError):
            raise
        raise BadRequestError(f"filename: {name}: {getattr(error, 'strerror', None) or error}", "filename") from None
    done, size = _ACTIONS[action]
    milliseconds = (time.perf_counter() - started) * 1000
    times = {f"{action}_ms": milliseconds}
    await call.respond({"id_slot": slot, "filename": name, done: n_tokens, size: n_bytes, "timings": times})


# --- responses


async def _answer(call: Call, request: NativeRequest) -> None:
    if request.prompt_embeds:
        raise BadRequestError("prompt_embeds: give it to /v1/completions", "prompt_embeds", "unsupported_parameter")
    n_prompts = 1 if has_pictures(request.prompt) else len(as_prompts(request.prompt, "prompt", 64))
    several = n_prompts * (request.n or request.n_cmpl or 1) > 1
    request.return_token_ids = bool(request.return_tokens or request.stream or several)
    made = await prepared(call, request)
    _, model = await call.model(request.model)
    texts = [spelled(model, ids) for ids in made.generation.prompts]
    async with call.run(made.generation) as events:
        shapes = _Shapes(request, made, texts, several=several)
        if not request.stream:
            found = await shapes.whole(events)
            await call.respond(found if several else found[0])
            return
        async with call.stream(error_event=lambda error: event(openai_body(error))) as write:
            async for one in events:
                if data := b"".join(map(event, shapes.chunks(one))):
                    await write(data)


class _Shapes:
    """Responses of one request: whole, and as chunks of a stream.

    `texts` are the prompts with special tokens spelled. The last chunks of all choices follow the end of the request,
    because they have its times.
    """

    def __init__(self, request: NativeRequest, made: Prepared, texts: Sequence[str], *, several: bool):
        self._request, self._made, self._texts, self._several = request, made, texts, several
        n = made.generation.n * len(made.generation.prompts)
        self._settings = generation_settings(request, made.generation)
        self._n_ctx = made.info.n_ctx or math.inf
        self._choices = [Choice() for _ in range(n)]
        self._n_tokens = [0] * n
        self._times: dict[str, Any] = {}

    async def whole(self, events: AsyncIterator[Event]) -> list[dict[str, Any]]:
        """The response without a stream, of each choice."""
        reply = await joined(events, self._made.generation, len(self._choices))
        self._n_tokens = [len(choice.tokens) for choice in reply.choices]
        done = Done(reply.usage, reply.timings)
        return [self._last(i, choice, done, "".join(choice.text)) for i, choice in enumerate(reply.choices)]

    def chunks(self, one: Event) -> Iterator[dict[str, Any]]:
        """Chunks of an event."""
        match one:
            case PromptProgress():
                if self._request.timings_per_token:
                    self._times = {"timings": progress_timings(one)}
                yield {**self._chunk(0, "", ()), "prompt_progress": llamacpp_progress(one)}
            case TokenTimings():
                self._times = {"timings": llamacpp_timings(one.usage, one.timings)}
            case TextDelta() if one.text or one.tokens:
                self._n_tokens[one.index] += len(one.tokens)
                self._choices[one.index].text.append("\n" if "\n" in one.text else "")
                yield from (self._chunk(one.index, text, tokens) for text, tokens in _single(one))
            case Finished():
                choice = self._choices[one.index]
                choice.finish, choice.stop_string, choice.timed_out = one.reason, one.stop_string, one.timed_out
            case Done():
                for i, choice in enumerate(self._choices):
                    yield self._last(i, choice, one, "")

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        scores = {} if self._made.n_top is None else {"completion_probabilities": self._scores(tokens)}
        return {
            "index": index,
            "content": text,
            "tokens": [token.id for token in tokens],
            "stop": False,
            "id_slot": -1 if self._made.generation.slot is None else self._made.generation.slot,
            "tokens_predicted": self._n_tokens[index],
            "tokens_evaluated": self._n_prompt(index),
            **scores,
            **self._times,
        }

    def _last(self, index: int, choice: Choice, done: Done, text: str) -> dict[str, Any]:
        usage, timings = self._counts(index, done)
        kind = "limit" if choice.finish == "length" else "word" if choice.stop_string else "eos"
        is_scored = self._made.n_top is not None and not self._request.stream
        found = {
            **self._chunk(index, text, choice.tokens if self._request.return_tokens else ()),
            "stop": True,
            "model": self._made.info.name,
            "tokens_predicted": usage.generated,
            "generation_settings": self._settings,
            "prompt": self._texts[index // self._made.generation.n],
            "has_new_line": "\n" in "".join(choice.text),
            "truncated": kind == "limit" and usage.prompt + usage.generated >= self._n_ctx,
            "stop_type": kind,
            "stopping_word": choice.stop_string or "",
            "tokens_cached": usage.prompt + usage.generated,
            "timings": llamacpp_timings(usage, timings, timed_out=choice.timed_out),
        }
        found.pop("completion_probabilities", None)
        if is_scored:
            found["completion_probabilities"] = self._scores(choice.tokens)
        return _selected(found, self._request.response_fields) if self._request.response_fields else found

    def _counts(self, index: int, done: Done) -> tuple[Usage, Timings]:
        """Counts of a choice; the times are those of the request."""
        if not self._several:
            return done.usage, done.timings
        return Usage(self._n_prompt(index), 0, self._n_tokens[index]), done.timings

    def _scores(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return _scores(tokens, self._made.n_top or 0, drawn=bool(self._request.post_sampling_probs))

    def _n_prompt(self, index: int) -> int:
        return len(self._made.generation.prompts[index // self._made.generation.n])


def _single(delta: TextDelta) -> Iterator[tuple[str, Sequence[TokenLogprob]]]:
    """Parts of a text with a token each.

    Where tokens are no whole characters, the text in one.
    """
    pieces = [token.piece.decode("utf-8", "ignore") for token in delta.tokens]
    if len(pieces) > 1 and all(pieces) and "".join(pieces) == delta.text:
        yield from ((piece, (token,)) for piece, token in zip(pieces, delta.tokens, strict=True))
    else:
        yield delta.text, delta.tokens


def _scores(tokens: Sequence[TokenLogprob], n_top: int, *, drawn: bool = False) -> list[dict[str, Any]]:
    """Log-probabilities of tokens; of those `drawn` the probabilities."""

    def shape(token: int, piece: bytes, logprob: float | None) -> dict[str, Any]:
        text, score = piece.decode("utf-8", "replace"), logprob or 0.0
        scored = {"prob": math.exp(score)} if drawn else {"logprob": max(score, MIN_LOGPROB)}
        return {"id": token, "token": text, "bytes": [*piece], **scored}

    others = "top_probs" if drawn else "top_logprobs"
    return [
        {**shape(one.id, one.piece, one.logprob), others: [shape(*other) for other in one.top[:n_top]]}
        for one in tokens
    ]


def _selected(found: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    selected = {}
    for name in names:
        value: Any = msgspec.to_builtins(found)
        for part in name.split("/"):
            value = value.get(part, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
        if value is not msgspec.UNSET:
            selected[name] = value
    return selected
