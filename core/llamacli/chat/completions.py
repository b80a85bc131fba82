"""Completions with the arguments and results of llama-cpp-python, after OpenAI's API.

`Model.create_chat_completion` and `Model.create_completion` call these functions. Results are dictionaries of JSON.
"""

from __future__ import annotations

import collections
import difflib
import inspect
import json
import secrets
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.chat.codec import ChatCodec, ReplyReader
from llamacli.chat.constraints import FREE, Constraint, completion_constraint, reply_constraint
from llamacli.chat.context import plan
from llamacli.chat.logprobs import CompletionLogprobs, Drawn, TokenLogprob, chat_logprobs, take_content, token_logprob
from llamacli.chat.media import marked, media_inputs, with_pictures
from llamacli.chat.messages import CallDelta, ToolCall, checked_tools
from llamacli.chat.openai import (
    Json,
    call_deltas,
    checked_schema,
    choice,
    message,
    schema_of,
    text_of_part,
    text_of_parts,
    tool_use,
    usage,
)
from llamacli.chat.syntax import Event
from llamacli.chat.template import Rendering
from llamacli.engine.compiled_model import CompiledModel
from llamacli.errors import InvalidRequestError, MediaError, expect_type
from llamacli.generation.drafting import Drafter
from llamacli.generation.text import Token
from llamacli.gguf import Metadata
from llamacli.inputs import Inputs
from llamacli.media.encoder import LoadedEncoder, Medium
from llamacli.media.files import data_of_base64
from llamacli.media.pictures import Picture, data_of_uri
from llamacli.media.sound import MAX_BYTES, Sound
from llamacli.sampling import Candidates, SamplerChain, SamplingParams, build_chain
from llamacli.sampling.candidates import Logits
from llamacli.sampling.defaults import params_with_defaults
from llamacli.sampling.sampler import Steer
from llamacli.session import Session
from llamacli.util.foreign_names import OURS, refuse_foreign
from llamacli.util.numbers import is_integer

_ROLES = {"developer": "system"}
_APART = ("json_schema", "seed", "model", "speculate", "logits_processor", "stopping_criteria")
"""Arguments that are no sampling parameters."""

Answer = TypeVar("Answer")
Processor: TypeAlias = Callable[[npt.NDArray[np.int32], Logits], Answer]
Processors: TypeAlias = Processor[Answer] | Sequence[Processor[Answer]] | None


@attrs.frozen(kw_only=True)
class CompletionArguments:
    """Arguments that both kinds of completion share.

    The names are llama-cpp-python's. None is the default of the model's file, else llama.cpp's.

    - `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`, `repeat_penalty`, `presence_penalty`, `frequency_penalty`,
      `mirostat_mode`, `mirostat_tau`, `mirostat_eta`, `logit_bias`: see `llamacli.SamplingParams`.
    - `reasoning_budget`, `reasoning_budget_message`: tokens of reasoning, and the text before its forced end.
    - `seed`: of the draws; None for a random one.
    - `stop`: a string or several, before which the text ends.
    - `grammar`: GBNF that constrains the text; `json_schema`: a JSON Schema, as a dict, or a Pydantic model, of which
      `parsed` of the message, or of the choice of a completion, is an instance.
    - `model`: the name of the model in the result; None for that of its file.
    - `speculate`: drafter of speculative decoding, as for `Session.generate`.
    - `logits_processor`: functions (or one) of the ids of all tokens so far, int32 [n], and the logits, float32
      [n_vocab], that return the logits to draw from.
    - `stopping_criteria`: functions (or one) of the same, which are asked after each token whether the text ends.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat_mode: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    logit_bias: Mapping[int, float] | None = None
    reasoning_budget: int | None = None
    reasoning_budget_message: str | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    grammar: str | None = None
    json_schema: Any = None
    model: str | None = None
    speculate: Drafter | None = None
    logits_processor: Processors[Logits] = ()
    stopping_criteria: Processors[bool] = ()

    def sampling(
        self, model: CompiledModel, metadata: Metadata, constraint: Constraint, n_probs: int
    ) -> SamplingParams:
        """Sampling parameters. Raises InvalidRequestError for a value that is not valid."""
        own = attrs.asdict(self, recurse=False, filter=attrs.filters.exclude(*_APART))
        given = {OURS.get(name, name): value for name, value in own.items()} | {
            "grammar": constraint.grammar,
            "json_schema": constraint.json_schema,
            "grammar_triggers": constraint.triggers,
            "grammar_after": constraint.after,
            "n_probs": n_probs,
        }
        return params_with_defaults(given, metadata, model.config.n_ctx, model.find_sampler)

    def parsed(self, response_format: Any) -> Callable[[str], Any] | None:
        """Parser of a text into an instance of a Pydantic model."""
        return getattr(self.json_schema or response_format, "model_validate_json", None)

    def head(self, kind: str, metadata: Metadata) -> Json:
        """Fields that begin every result."""
        name = self.model or metadata.get_str("general.name", "") or metadata.get_str("general.architecture", "")
        return {"id": f"{kind}-{uuid.uuid4()}", "created": int(time.time()), "model": name}

    def session(self, model: CompiledModel) -> Session:
        """New session with the seed."""
        return Session(model, seed=secrets.randbits(63) if self.seed is None else self.seed)


def completion_arguments(method: Callable[..., Any], given: Mapping[str, Any]) -> CompletionArguments:
    """Further arguments of a method of `Model`.

    Raises TypeError for an unknown name, with the one to use.
    """
    accepted = {*inspect.signature(method).parameters, *attrs.fields_dict(CompletionArguments)}
    refuse_foreign(method.__qualname__, given, accepted)
    for name in given.keys() - accepted:
        similar = "".join(f"; did you mean {one!r}?" for one in difflib.get_close_matches(name, accepted, 1))
        raise TypeError(f"{method.__qualname__}() got an unexpected keyword argument {name!r}{similar}")
    return CompletionArguments(**given)


def chat_completion(
    model: CompiledModel,
    metadata: Metadata,
    codec: ChatCodec,
    messages: Sequence[Mapping[str, Any]],
    arguments: CompletionArguments,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Any = None,
    max_tokens: int | None = None,
    logprobs: bool | None = None,
    top_logprobs: int | None = None,
    variables: Mapping[str, Any] | None = None,
    media: Callable[[], LoadedEncoder | None] = lambda: None,
) -> Generator[Json, None, Json]:
    """Chunks of the reply to a conversation.

    The whole result is the generator's return value. The first token is computed when the first chunk is asked for.
    `media` finds the encoder of pictures. Raises at once what is wrong with the arguments.
    """
    use = tool_use(checked_tools(tools) or (), tool_choice)
    schema = _schema_of(arguments, response_format)
    if arguments.grammar is not None and schema is not None:
        raise InvalidRequestError("a grammar and a JSON Schema exclude each other")
    if top_logprobs and not logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=True")
    described = None if use is None else use.tools
    marked_messages, pictures = marked(_as_messages(messages, media))
    rendering = codec.render(marked_messages, tools=described, variables=variables)
    constraint = FREE
    if arguments.grammar is not None or schema is not None or use is not None:
        constraint = reply_constraint(codec, rendering.prompt, schema, arguments.grammar, use)
    if constraint.triggers and find_spec("llguidance") is None:
        constraint = FREE  # calls that the model may make are parsed without a grammar too
    n_top = (top_logprobs or 0) if logprobs else None
    params = arguments.sampling(model, metadata, constraint, 0 if n_top is None else max(1, n_top))
    params = codec.budgeted(params, rendering)
    reader = codec.reader(rendering, tools=described or (), variables=variables)
    prompt = _prompt(rendering, pictures, codec, media)
    run = _Run(arguments.session(model), prompt, params, max_tokens, arguments)
    head = {**arguments.head("chatcmpl", metadata), "object": "chat.completion"}
    return _chat_chunks(run, reader, head, n_top, arguments.parsed(response_format))


def _chat_chunks(
    run: _Run, reader: ReplyReader, head: Json, n_top: int | None, parse: Callable[[str], Any] | None
) -> Generator[Json, None, Json]:
    read: list[TokenLogprob] = []
    drawn: Drawn = collections.deque()
    n_calls = n_begun = 0

    def chunk(delta: Json, shape: Json | None = None, finish: str | None = None) -> Json:
        return {**head, "object": "chat.completion.chunk", "choices": [choice(0, "delta", delta, shape, finish)]}

    def content(text: str, tokens: Sequence[TokenLogprob]) -> Json:
        read.extend(tokens)
        return chunk({"content": text}, None if n_top is None else chat_logprobs(tokens, n_top))

    def chunks(events: Sequence[tuple[Event, int]]) -> Iterator[Json]:
        nonlocal n_calls, n_begun
        for event, start in events:
            if isinstance(event, CallDelta):
                deltas = call_deltas(event.id, n_calls, event.name, event.text, begins=n_begun == n_calls)
                yield from map(chunk, deltas)
                n_begun = n_calls + 1
            elif isinstance(event, ToolCall):
                n_calls += 1
            elif event.reasoning:
                yield chunk({"reasoning_content": event.text})
            else:
                tokens = take_content(drawn, start, start + len(event.text))
                yield content(event.text, [token for _, token in tokens])

    yield chunk({"role": "assistant"})
    ended = False
    with run.session:
        for token in run.tokens:
            if token.id in reader.ends.tokens:
                ended = True
                break
            run.n_generated += 1
            start, events = reader.n_read, reader.locate(token.id, token.piece)
            if n_top is not None:
                scored = token_logprob(run.session.model.tokenizer, token.id, token.logprobs)
                drawn.append((start, reader.n_read, scored))
            yield from chunks(events)
            if reader.ended:
                ended = True
                break
        yield from chunks(reader.locate_rest())
        if rest := [token for start, _, token in drawn if start == reader.n_read]:  # tokens without text at the end
            yield content("", rest)
        finish = "stop" if ended else run.finish_reason
        finish = "tool_calls" if n_calls and finish == "stop" else finish
    yield chunk({}, finish=finish)
    reply, shape = reader.message(), None if n_top is None else chat_logprobs(read, n_top)
    calls = [(call.id, call) for call in reply.tool_calls]
    whole = message(reply.content, reply.reasoning, calls)
    if parse is not None:
        whole["parsed"] = parse(reply.content) if finish == "stop" else None
    return {**head, "choices": [choice(0, "message", whole, shape, finish)], "usage": run.usage}


def completion(
    model: CompiledModel,
    metadata: Metadata,
    prompt: str | Sequence[int] | Inputs,
    arguments: CompletionArguments,
    *,
    suffix: str | None = None,
    max_tokens: int | None = 16,
    echo: bool = False,
    logprobs: int | None = None,
) -> Generator[Json, None, Json]:
    """Chunks of the text after a prompt, or before a suffix.

    The whole result is the generator's return value. Raises at once what is wrong with the arguments.
    """
    if logprobs is not None and (not is_integer(logprobs) or logprobs < 0):
        raise InvalidRequestError(f"logprobs must be an integer of at least 0, not {logprobs!r}")
    schema = _schema_of(arguments, None)
    if arguments.grammar is not None and schema is not None:
        raise InvalidRequestError("a grammar and a JSON Schema exclude each other")
    constraint = completion_constraint(schema, arguments.grammar)
    params = arguments.sampling(model, metadata, constraint, 0 if logprobs is None else max(1, logprobs))
    expect_type(prompt, (str, Iterable, Inputs), "prompt", "a text or token ids")
    if isinstance(prompt, Inputs) and (echo or suffix is not None):
        raise InvalidRequestError("echo and suffix need a prompt of text or token ids, not Inputs")
    session, before = arguments.session(model), ""
    if isinstance(prompt, Inputs):
        given: Sequence[int] | Inputs = prompt
    else:
        infill = None if suffix is None else model.tokenizer.encode_infill(prompt, suffix)
        given = ids = infill or (session.encode(prompt) if isinstance(prompt, str) else list(prompt))
        before = "" if not echo else prompt if isinstance(prompt, str) else model.decode(ids)
    run = _Run(session, given, params, max_tokens, arguments)
    head = {**arguments.head("cmpl", metadata), "object": "text_completion"}
    return _text_chunks(run, before, head, logprobs, arguments.parsed(None))


def _text_chunks(
    run: _Run, before: str, head: Json, n_top: int | None, parse: Callable[[str], Any] | None
) -> Generator[Json, None, Json]:
    tokenizer, texts, read = run.session.model.tokenizer, [before], list[TokenLogprob]()
    shapes = None if n_top is None else CompletionLogprobs(n_top, len(before))

    def chunk(text: str, shape: Json | None = None, finish: str | None = None) -> Json:
        return {**head, "choices": [choice(0, "text", text, shape, finish)]}

    if before:
        yield chunk(before)
    with run.session:
        for token in run.tokens:
            run.n_generated += 1
            texts.append(token.piece)
            read.append(token_logprob(tokenizer, token.id, token.logprobs))
            yield chunk(token.piece, None if shapes is None else shapes.add(read[-1:]))
        finish = run.finish_reason
    yield chunk("", finish=finish)
    shape = None if n_top is None else CompletionLogprobs(n_top, len(before)).add(read)
    result = choice(0, "text", "".join(texts), shape, finish)
    if parse is not None:
        result["parsed"] = parse("".join(texts[1:])) if finish == "stop" else None
    return {**head, "choices": [result], "usage": run.usage}


def whole(chunks: Generator[Json, None, Json]) -> Json:
    """Result of all chunks."""
    while True:
        try:
            next(chunks)
        except StopIteration as end:
            result: Json = end.value
            return result


class _Run:
    """Generation of one completion in a session of its own."""

    def __init__(
        self,
        session: Session,
        ids: Sequence[int] | Inputs,
        params: SamplingParams,
        max_tokens: int | None,
        arguments: CompletionArguments,
    ):
        if max_tokens is not None and not is_integer(max_tokens):
            raise InvalidRequestError(f"max_tokens must be an integer or None, not {max_tokens!r}")
        self.session, self._n_prompt, self.n_generated = session, len(ids), 0
        # llama-cpp-python: no limit but the context for None, 0 and less
        self._limit = max_tokens if max_tokens is not None and max_tokens > 0 else session.n_ctx
        chain: SamplingParams | SamplerChain = params
        if processors := _functions(arguments.logits_processor, "logits_processor"):
            own = build_chain(params, session.model.tokenizer, session.model.find_sampler)
            chain = SamplerChain([Steer(self._steering(processors)), *own.samplers], own.n_probs, params)
        tokens = session.generate(ids, chain, max_tokens=self._limit, speculate=arguments.speculate)
        criteria = _functions(arguments.stopping_criteria, "stopping_criteria")
        self.tokens: Iterator[Token] = self._until(tokens, criteria) if criteria else tokens

    def _ids(self) -> npt.NDArray[np.int32]:
        return np.array(self.session.tokens, np.int32)

    def _steering(self, processors: Sequence[Processor[Logits]]) -> Callable[[Candidates], None]:
        def steer(candidates: Candidates) -> None:
            ids = self._ids()
            for processor in processors:
                returned = processor(ids, candidates.logits)
                if returned is None:
                    raise InvalidRequestError("logits_processor returned None: it must return the logits")
                logits = np.asarray(returned, np.float32)
                if logits.shape != candidates.logits.shape:
                    raise InvalidRequestError(f"logits_processor: its logits have the shape {list(logits.shape)}")
                candidates.logits[:] = logits

        return steer

    def _until(self, tokens: Iterator[Token], criteria: Sequence[Processor[bool]]) -> Iterator[Token]:
        drawn: list[int] = []
        for token in tokens:
            yield token
            drawn.append(token.id)
            ids = np.append(self._ids()[: self._n_prompt], np.array(drawn, np.int32))
            if any(criterion(ids, self.session.logits) for criterion in criteria):
                return

    @property
    def finish_reason(self) -> str:
        """Finish reason: "length" for `max_tokens` or a full context, else "stop"."""
        if self.session.stop_string:
            return "stop"
        is_full = self.session.n_past == self.session.n_ctx
        return "length" if is_full or self.n_generated == self._limit else "stop"

    @property
    def usage(self) -> Json:
        """Numbers of tokens."""
        return usage(self._n_prompt, self.n_generated)


def _prompt(
    rendering: Rendering,
    pictures: Mapping[str, Medium],
    codec: ChatCodec,
    media: Callable[[], LoadedEncoder | None],
) -> Sequence[int] | Inputs:
    encoder = media() if pictures else None
    if encoder is None:
        return codec.encode(rendering)
    layouts = {marker: encoder.layout(picture) for marker, picture in pictures.items()}
    shown = with_pictures(rendering, layouts, encoder, codec.tokenizer)
    inputs = media_inputs(plan([], shown.parts, codec.template.encode).parts, 0, lambda: encoder)
    assert inputs is not None
    return inputs


def _schema_of(arguments: CompletionArguments, response_format: Any) -> Json | bool | None:
    given = arguments.json_schema
    if given is None:
        return schema_of(response_format)
    if response_format is not None:
        raise InvalidRequestError("json_schema and response_format exclude each other")
    return schema_of(given) if hasattr(given, "model_json_schema") else checked_schema(given)


def _functions(given: Processors[Answer], name: str) -> list[Processor[Answer]]:
    functions: Any = [given] if callable(given) else given or ()
    if not isinstance(functions, Sequence) or not all(map(callable, functions)):
        raise InvalidRequestError(f"{name} must be a function or several, not {given!r}")
    return list(functions)


def _as_messages(messages: Sequence[Mapping[str, Any]], media: Callable[[], LoadedEncoder | None]) -> list[Json]:
    """Messages as chat templates take them, but for pictures.

    Content is text, with pictures a list; arguments of calls are objects.
    """
    expect_type(messages, Sequence, "messages", "a sequence of messages")
    if not messages:
        raise InvalidRequestError("messages is empty: at least one is needed")
    return [_as_message(message, i, media) for i, message in enumerate(messages)]


def _as_message(message: Any, i: int, media: Callable[[], LoadedEncoder | None]) -> Json:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f'messages[{i}] must be {{"role": ..., "content": ...}}, not {str(message)[:80]}')
    role, content = message["role"], message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        sees = any(isinstance(part, Mapping) and part.get("type") in [*_MEDIA] for part in content) and media()
        path = f"messages[{i}].content"
        content = _seen(content, path) if sees else text_of_parts(map(_part, content), path)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"messages[{i}].content must be a text, not {content!r}")
    result = {**message, "role": _ROLES.get(role, role), "content": content or ""}
    if calls := message.get("tool_calls"):
        expect_type(calls, Sequence, f"messages[{i}].tool_calls", "a sequence of calls")
        result["tool_calls"] = [_parsed_call(call, i) for call in calls]
    return result


_MEDIA = {"image_url": "url", "input_audio": "data"}
"""Types of parts with media, and the fields of them."""


def _seen(content: Sequence[Any], path: str) -> list[str | Medium]:
    """Texts, pictures and sound of a content.

    Texts that follow each other are joined by newlines. Raises MediaError for an address that is no data URI, or what
    is no picture or sound.
    """
    parts: list[str | Medium] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in [*_MEDIA]:
            given = part.get(kind)
            data = given.get(_MEDIA[kind]) if isinstance(given, Mapping) else given
            if not isinstance(data, str):
                raise InvalidRequestError(f"{path}[{i}].{kind}.{_MEDIA[kind]} must be a text, not {data!r}")
            try:
                is_picture = kind == "image_url"
                parts.append(
                    Picture.of(data_of_uri(data)) if is_picture else Sound.of(data_of_base64(data, MAX_BYTES, "sound"))
                )
            except MediaError as error:
                raise MediaError(f"{path}[{i}].{kind}: {error}") from None
        else:
            text = text_of_part(*_part(part), f"{path}[{i}]")
            parts += ["\n", text] if parts and isinstance(parts[-1], str) else [text]
    return parts


def _part(part: Any) -> tuple[str, str | None]:
    if not isinstance(part, Mapping):
        return type(part).__name__, None
    kind, text = part.get("type", "text"), part.get("text")
    return kind, text if kind == "text" and isinstance(text, str) else None


def _parsed_call(call: Any, i: int) -> Json:
    try:
        function = dict(call["function"])
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return {**call, "function": {"name": function["name"], "arguments": arguments}}
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"messages[{i}].tool_calls: not a call of a function: {error}") from None
