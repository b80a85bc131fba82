"""Chat sessions: conversations with a model over one token stream."""

from __future__ import annotations

import contextlib
import html
import inspect
import json
import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat.codec import ChatCodec
from llamacli.chat.constraints import reply_constraint
from llamacli.chat.context import Evaluated, Part, Plan, extended, plan, truncated
from llamacli.chat.formats import ChatFormat
from llamacli.chat.functions import MAX_ROUNDS, Tools, call, described
from llamacli.chat.media import marked, media_inputs, with_pictures
from llamacli.chat.messages import Message, Piece, ToolCall
from llamacli.chat.openai import tool_use
from llamacli.chat.syntax import Event
from llamacli.chat.template import Rendering
from llamacli.engine.compiled_model import CompiledModel
from llamacli.errors import ChatTemplateError, ContextOverflowError, InvalidRequestError, MediaError, StateError
from llamacli.generation.drafting import Drafter
from llamacli.generation.heat import coloured
from llamacli.generation.loop import token_limit
from llamacli.generation.text import Token
from llamacli.gguf import Metadata
from llamacli.kv.prefixes import n_common
from llamacli.media.encoder import LoadedEncoder, Tile
from llamacli.media.pictures import Picture
from llamacli.media.sound import Sound
from llamacli.sampling import SamplerChain, SamplingParams
from llamacli.session import Session
from llamacli.util.asynchronous import in_threads

_PROBE = "Xyzzy"


class ChatSession(contextlib.AbstractContextManager["ChatSession"]):
    """Conversation with a model, which streams its replies.

    - `session`: the token stream that it is evaluated in.
    - `codec`: the encoder of prompts and decoder of replies, with its chat `template` and `format`.
    - `history`: all messages so far except the system message. `system`, `history` and `variables` may be changed
      between replies: the next reply continues from their new values.
    - `max_tokens`: maximum number of tokens of a reply; created with None or -1, the size of the context.
    - `tools`: functions that the model may call, as JSON objects; some templates tell an empty list from None.
      `functions`: the Python functions among the tools by name, which `run_tools` calls. `variables`: further variables
      of the template.
    - `stop`: stop reason of the last reply: "eos" (the model ended it), "stop" (a stop string of the parameters),
      "length" (`max_tokens`), "context" (the context is full), "interrupt" (the caller left the loop).
    - `reply_tokens`: the tokens of the last reply.

    Only new messages are evaluated: earlier ones keep the tokens that they were evaluated with. If a template renders
    them differently later on (some drop old reasoning, some move the system message to the last message), the session
    is rewound to the first difference, and the rest is evaluated again.
    """

    def __init__(
        self,
        model: CompiledModel,
        system: str = "",
        max_tokens: int | None = None,
        *,
        metadata: Metadata,
        formats: Sequence[ChatFormat],
        session: Session | None = None,
        seed: int | None = 1234,
        template: str | None = None,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
        media: Callable[[], LoadedEncoder] | None = None,
    ):
        limit = token_limit(max_tokens, model.config.n_ctx if session is None else session.n_ctx)
        self.use_tools(tools)
        self.codec = ChatCodec(model.tokenizer, metadata, formats, template, tools=bool(self.tools))
        self.template, self.format = self.codec.template, self.codec.format
        self.model, self.system, self.max_tokens = model, system, limit
        self.history: list[Message] = []
        self.variables = dict(variables or {})
        self.stop = ""
        self.reply_tokens: list[Token] = []
        self.session = Session(model, seed=seed) if session is None else session
        self._held: list[Evaluated] = []
        self._media = media

    def __repr__(self) -> str:
        used, n_ctx = self.session.n_past, self.session.n_ctx
        return f"<ChatSession of {self.model.name!r}: {len(self.history)} messages, {used} of {n_ctx} tokens>"

    def _repr_html_(self) -> str:
        """The conversation as HTML, for notebooks.

        The tokens of the last reply are coloured if they have log-probabilities.
        """
        lines = [f"<b>{html.escape(one.role)}</b> {html.escape(_shown(one))}" for one in self.history]
        if lines and not self.pending and any(token.logprobs for token in self.reply_tokens):
            lines[-1] = f"<b>assistant</b> {coloured(self.model.tokenizer, self.reply_tokens)}"
        return "".join(f'<p style="white-space: pre-wrap">{line}</p>' for line in lines) or html.escape(repr(self))

    def use_tools(self, tools: Tools | None) -> None:
        """Replace the tools: Python functions with type hints, or JSON objects.

        Raises InvalidRequestError for a tool that is neither, whose parameters have no JSON Schema, or that is a
        coroutine function: `run_tools` calls functions that return their result.
        """
        self.tools, self.functions = described(tools)
        for name, function in self.functions.items():
            if inspect.iscoroutinefunction(function):
                raise InvalidRequestError(f"tool {name} is a coroutine function: define it by def, not async def")

    @property
    def pending(self) -> bool:
        """True if the last message is waiting for a reply."""
        return bool(self.history) and self.history[-1].role != "assistant"

    def add_user(self, text: str, images: Sequence[object] = (), audio: Sequence[object] = ()) -> None:
        """Add a user message, or replace the last one if unanswered.

        `images` and `audio`, which come before the text, are paths, the bytes of files, Pillow images or arrays, see
        `llamacli.media.pictures.Picture.of` and `llamacli.media.sound.Sound.of`. Raises MediaError for one that cannot
        be read, and if the model has no encoder of it.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"the text of a user message is a str, not {type(text).__name__}")
        if isinstance(images, str | bytes | os.PathLike):
            raise InvalidRequestError("images is a list of pictures: put a single one into a list")
        if isinstance(audio, str | bytes | os.PathLike):
            raise InvalidRequestError("audio is a list of sounds: put a single one into a list")
        for medium, given in ((Picture, images), (Sound, audio)):
            if len(given):
                self.media_encoder().expect(medium)
        pictures, sounds = tuple(map(Picture.of, images)), tuple(map(Sound.of, audio))
        if self.history and self.history[-1].role == "user":
            self.history.pop()
        self.history.append(Message("user", text, images=pictures, audio=sounds))

    def add_tool_result(self, call: ToolCall, result: Any) -> None:
        """Add the result of a tool call, as text or JSON."""
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        self.history.append(Message("tool", content, name=call.name, tool_call_id=call.id))

    def answer_calls(self, report: Callable[[ToolCall, Any], None] | None = None) -> bool:
        """Call the functions that the last reply calls, and add their results.

        False if there is none to call: the reply has no calls, or no tool is a function. An exception of a function is
        its result, `{"error": ...}`. `report` is called with each call and its result.
        """
        wanted = self.history[-1].tool_calls if self.functions and self.history else ()
        for one in wanted:
            result = call(self.functions, one)
            self.add_tool_result(one, result)
            if report is not None:
                report(one, result)
        return bool(wanted)

    def run_tools(
        self,
        params: SamplingParams | SamplerChain | None = None,
        *,
        max_rounds: int = MAX_ROUNDS,
        report: Callable[[ToolCall, Any], None] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        speculate: Drafter | None = None,
    ) -> Generator[Piece, None, None]:
        """Stream replies, calling the functions that they call, until one calls none.

        There are at most `max_rounds` replies after the first, to which alone `tool_choice` applies. Other arguments
        and the errors are `respond`'s, and `report` is `answer_calls`'.
        """
        for _ in range(max_rounds + 1):
            yield from self.respond(params, tool_choice=tool_choice, speculate=speculate)
            if not self.answer_calls(report):
                break
            tool_choice = None

    def run_tools_async(
        self,
        params: SamplingParams | SamplerChain | None = None,
        *,
        max_rounds: int = MAX_ROUNDS,
        report: Callable[[ToolCall, Any], None] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        speculate: Drafter | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Stream replies for `async for`, computing and calling functions in threads; see `run_tools`."""
        return in_threads(
            self.run_tools(params, max_rounds=max_rounds, report=report, tool_choice=tool_choice, speculate=speculate)
        )

    def retract(self) -> Message | None:
        """Remove and return the last reply.

        None if the last message is none.
        """
        return self.history.pop() if self.history and self.history[-1].role == "assistant" else None

    def drop_oldest_turn(self) -> bool:
        """Drop the first user message and its replies.

        False if it is the only one.
        """
        users = [i for i, message in enumerate(self.history) if message.role == "user"]
        del self.history[: users[1] if len(users) > 1 else 0]
        return len(users) > 1

    def clear(self) -> None:
        """Clear the history; the system message stays."""
        self.history.clear()

    def render_turn(self) -> list[int]:
        """Token ids that `respond` would evaluate now.

        Empty if no message is waiting for a reply. Nothing is evaluated or changed. Raises ChatTemplateError.
        """
        return self._plan_reply()[0].new_ids if self.pending else []

    @property
    def n_context(self) -> int:
        """Number of context tokens, with messages waiting for a reply.

        Raises ChatTemplateError.
        """
        return len(self._plan_reply()[0].ids) if self.pending else self.session.n_past

    def respond(
        self,
        params: SamplingParams | SamplerChain | None = None,
        *,
        tool_choice: str | Mapping[str, Any] | None = None,
        speculate: Drafter | None = None,
    ) -> Generator[Piece, None, None]:
        """Stream the model's reply to the last messages.

        Nothing if none is waiting for a reply. The reply ends at an end-of-generation token of the file, or at the
        token or text with which the template ends a message; neither is shown or counted. Then the template's text
        after a message is evaluated. The reply is added to `history`, with reasoning and tool calls apart. Leaving the
        loop ends it too, and the yielded text is kept. `speculate` is as for `Session.generate`. With "required", or
        OpenAI's object with a function's name, as `tool_choice` the reply is a call, by a grammar.

        Raises, before anything is evaluated, ContextOverflowError if the messages do not fit, ChatTemplateError if
        they cannot be rendered, and InvalidRequestError for a `tool_choice` that is unknown, needs tools, or meets a
        sampler chain or another grammar in `params`.
        """
        if not self.pending:
            return _no_pieces()
        wanted, rendering = self._plan_reply()
        n_new = len(wanted.new_ids)
        if wanted.n_kept + n_new > self.session.n_ctx:
            raise ContextOverflowError(wanted.n_kept, n_new, self.session.n_ctx)
        params = params or SamplingParams()
        if tool_choice not in (None, "auto"):
            params = self._calling(params, rendering, tool_choice)
        if isinstance(params, SamplingParams):
            params = self.codec.budgeted(params, rendering)
        return self._respond(wanted, rendering, params, speculate)

    def respond_async(
        self,
        params: SamplingParams | SamplerChain | None = None,
        *,
        tool_choice: str | Mapping[str, Any] | None = None,
        speculate: Drafter | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Stream the reply for `async for`, computing in threads; see `respond`."""
        return in_threads(self.respond(params, tool_choice=tool_choice, speculate=speculate))

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write conversation and session state to a file.

        Returns its size in bytes.
        """
        chat = {
            "system": self.system,
            "history": [message.as_dict() for message in self.history],
            "held": [[_saved(part.part), list(part.ids)] for part in self._held],
        }
        return self.session.save(path, chat=chat)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore a saved conversation, with the tokens that it has evaluated.

        Raises what `Session.load` raises, StateError also for a state without a conversation.
        """
        saved: Any = self.session.load(path).get("chat")
        self.history, self._held = [], []
        try:
            held = [
                Evaluated(_part(part, keys := tuple(map(int, ids))), keys) for part, ids in saved["held"]
            ]  # fmt: skip
            history = [Message.from_dict(message) for message in saved["history"]]
            self.system, self.history, self._held = str(saved["system"]), history, held
        except (InvalidRequestError, KeyError, TypeError, ValueError) as error:
            raise StateError(f"{os.fspath(path)}: its conversation cannot be read: {error}") from None

    def close(self) -> None:
        """Free the session's memory; closing twice does nothing."""
        self.session.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- replying

    def _calling(
        self, params: SamplingParams | SamplerChain, rendering: Rendering, choice: str | Mapping[str, Any] | None
    ) -> SamplingParams:
        use = tool_use(self.tools or (), choice)
        if use is None:
            raise InvalidRequestError("tool_choice: none: use_tools(None) takes the tools away")
        if not isinstance(params, SamplingParams) or params.grammar is not None or params.json_schema is not None:
            raise InvalidRequestError("tool_choice is a grammar: it needs SamplingParams without another one")
        wanted = reply_constraint(self.codec, rendering.prompt, None, None, use)
        return attrs.evolve(
            params, grammar=wanted.grammar, json_schema=wanted.json_schema, grammar_triggers=wanted.triggers,
            grammar_after=wanted.after,
        )  # fmt: skip

    def _respond(
        self, wanted: Plan, rendering: Rendering, params: SamplingParams | SamplerChain, speculate: Drafter | None
    ) -> Generator[Piece, None, None]:
        new_ids = self._rewind(wanted)
        prompt = media_inputs(wanted.parts, self.session.n_past, self.media_encoder) or new_ids
        n_calls = sum(len(message.tool_calls) for message in self.history)
        reply = self.codec.reader(rendering, tools=self.tools or (), variables=self.variables, n_calls=n_calls)
        generated: list[Token] = []
        self.reply_tokens = []
        tokens = self.session.generate(prompt, params, max_tokens=self.max_tokens, speculate=speculate)
        self.stop = "interrupt"
        try:
            stop = "eos" if self.max_tokens else "length"
            for n, token in enumerate(tokens, start=1):
                if token.id in reply.ends.tokens:
                    break
                generated.append(token)
                self.reply_tokens.append(token)
                yield from _pieces(reply.feed(token.id, token.piece))
                if reply.ended:
                    break
                stop = "length" if n == self.max_tokens else "eos"
            if self.session.stop_string:
                stop = "stop"
            elif stop == "eos" and self.session.n_past == self.session.n_ctx:
                stop = "context"
            yield from _pieces(reply.flush())
            self.stop = stop
        finally:
            tokens.close()
            n_accepted = max(0, self.session.n_past - len(wanted.ids))
            parts = extended(wanted.parts, generated[:n_accepted], self.template.structure)
            self._held = truncated(parts, self.session.n_past)
            if self.stop != "interrupt" or not reply.is_empty:
                self.history.append(reply.message())
        if self.stop in ("eos", "stop"):
            self._evaluate_closing()

    def _rewind(self, wanted: Plan) -> list[int]:
        """Rewind to the longest common prefix with the reply's prompt.

        The ids to evaluate.
        """
        if wanted.n_kept < self.session.n_past:
            self.session.rewind(wanted.n_kept)
        self._held = truncated(wanted.parts, self.session.n_past)
        return wanted.ids[self.session.n_past :]

    def _evaluate_closing(self) -> None:
        """Evaluate the text that follows a reply in every rendering.

        Renderings with and without another user message share it.
        """
        try:
            ends = [self._plan(self._render(more, prompting=False)) for more in ([], [Message("user", _PROBE)])]
        except ChatTemplateError:
            return
        if any(end.n_kept != self.session.n_past for end in ends):
            return
        n_closing = n_common(*(end.new_ids for end in ends))
        if self.session.n_past + n_closing <= self.session.n_ctx:
            self.session.eval(ends[0].new_ids[:n_closing])
            self._held = truncated(ends[0].parts, self.session.n_past)

    # --- rendering

    def _plan_reply(self) -> tuple[Plan, Rendering]:
        rendering = self._render([], prompting=True)
        wanted = self._plan(rendering)
        if not wanted.ids:
            raise ChatTemplateError("the chat template renders an empty prompt")
        return wanted.before_last(), rendering  # there are logits only of what is evaluated

    def _plan(self, rendering: Rendering) -> Plan:
        if self.session.tokens != tuple(token for part in self._held for token in part.ids):
            self._held = []  # the session was used outside of this chat
        return plan(self._held, rendering.parts, self.template.encode)

    def _render(self, more: Sequence[Message], *, prompting: bool) -> Rendering:
        history = (*self.history, *more)
        messages = [attrs.evolve(message, images=(), audio=()).as_dict() for message in history]
        for message, shown in zip(messages, history, strict=True):
            if shown.media:
                message["content"] = [*shown.media, shown.content]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        messages, pictures = marked(messages)
        rendering = self.codec.render(
            messages, tools=self.tools, add_generation_prompt=prompting, variables=self.variables
        )
        if not pictures:
            return rendering
        encoder = self.media_encoder()
        layouts = {marker: encoder.layout(picture) for marker, picture in pictures.items()}
        return with_pictures(rendering, layouts, encoder, self.model.tokenizer)

    def media_encoder(self) -> LoadedEncoder:
        """Encoder of pictures or sound of the model, see `Model.media_encoder`."""
        if self._media is None:
            raise MediaError(f"the model {self.model.name!r} has no encoder of pictures or sound")
        return self._media()


def _no_pieces() -> Generator[Piece, None, None]:
    yield from ()


def _shown(message: Message) -> str:
    calls = (f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in message.tool_calls)
    return "\n".join(filter(None, (message.content, *calls)))


def _saved(part: Part | None) -> Any:
    return {"tile": part.key.hex()} if isinstance(part, Tile) else part


def _part(value: Any, ids: tuple[int, ...]) -> Part | None:
    if isinstance(value, dict):
        return Tile(bytes.fromhex(value["tile"]), ids)
    if value is not None and not isinstance(value, (int, str)):
        raise TypeError(f"{value!r} is not a part of a conversation")
    return value


def _pieces(events: Sequence[Event]) -> list[Piece]:
    return [event for event in events if isinstance(event, Piece)]
