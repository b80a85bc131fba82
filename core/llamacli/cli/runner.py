"""Execution of `llamacli run`: load the model, generate, report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
import click

from llamacli.cli.chat import ChatOptions, at_terminal, reply_as_json, reply_once, shown
from llamacli.cli.conversations import Conversation, conversation_log
from llamacli.cli.functions import load_functions
from llamacli.cli.generate import Completion, CompletionWriter, complete
from llamacli.cli.logprobs import logprobs_as_json, print_logprobs, write_heat
from llamacli.cli.mcp import mcp_functions
from llamacli.cli.options import warn_of_long_context
from llamacli.cli.output import human_bytes, note, one_line, print_json, write
from llamacli.cli.progress import load
from llamacli.cli.sampling import sampling_params
from llamacli.cli.speculation import open_drafter
from llamacli.errors import InvalidRequestError, LlamaCliError
from llamacli.util.system import peak_rss

if TYPE_CHECKING:
    from llamacli import ChatSession, Model, SamplingParams, Session, Stats
    from llamacli.chat.functions import Functions
    from llamacli.cli.repl import Repl
    from llamacli.stages.link import Workers

_log = logging.getLogger(__name__)

_EXAMPLES = {
    "grammar": """, such as --grammar 'root ::= "yes" | "no"'""",
    "json_schema": """, such as --json-schema '{"type": "object"}'""",
}
"""Ends of the messages for wrong parameters."""


@attrs.frozen(kw_only=True)
class RunOptions:
    """The parsed options of a run; `sampling` has those that `sampling_params` reads."""

    model: str
    prompt: str
    chat: ChatOptions
    max_tokens: int
    ctx_size: int
    threads: int | None
    seed: int
    ignore_eos: bool
    display_prompt: bool
    mode: str
    load_mode: str
    prompts: str
    overrides: dict[str, Any]
    kv_type: str | tuple[str, str] | None
    lora: tuple[tuple[str, float], ...]
    images: tuple[str, ...]
    audio: tuple[str, ...]
    mmproj: str | None
    load_session: str | None
    save_session: str | None
    prompt_cache: str | None
    workers: Workers | None
    lookup: bool
    draft: str | None
    draft_max: int
    stats: bool
    json: bool
    html: str | None
    sampling: dict[str, Any]

    @classmethod
    def pop_from(cls, given: dict[str, Any], **more: Any) -> Self:
        """Remove the options from a command's parameters, leaving those of sampling."""
        own = {field.name: given.pop(field.name) for field in attrs.fields(cls) if field.name in given}
        return cls(**own, **more, sampling=given)


@attrs.frozen
class RunStats:
    """Statistics of a process: load time, session, seed, memory.

    `load_s` is in seconds, `peak_rss` in bytes. `numpy_shares` are the shares of the computing time, from 0 to 1, that
    verbs without a kernel took.
    """

    load_s: float
    session: Stats
    seed: int
    numpy_shares: dict[str, float] = attrs.field(factory=dict)
    peak_rss: int | None = attrs.field(factory=peak_rss)

    def as_dict(self) -> dict[str, float | int | None]:
        """The statistics as a flat dict, for JSON."""
        return attrs.asdict(self, filter=lambda field, _: field.name != "session") | attrs.asdict(self.session)

    def print(self) -> None:
        """Print them to stderr."""
        s = self.session
        note(f"load          {self.load_s:.2f} s")
        note(f"prompt        {s.n_prompt} tokens, {s.n_reused} of them reused, {s.prefill_tps:.1f} tok/s")
        note(f"first token   {s.ttft_s * 1000:.0f} ms")
        note(f"generated     {s.n_gen} tokens, {s.gen_tps:.1f} tok/s")
        if s.n_drafted:
            note(f"drafted       {s.n_drafted} tokens, {s.n_accepted} of them accepted")
        for verb in sorted({op.partition(",")[0] for op in self.numpy_shares}):
            share = sum(share for op, share in self.numpy_shares.items() if op.startswith(f"{verb},"))
            note(f"NumPy         {share:.1%} of the time: {verb} has no kernel")
        if self.peak_rss is not None:
            note(f"peak memory   {human_bytes(self.peak_rss)}")
        note(f"seed          {self.seed}")


@attrs.frozen
class Result:
    """Result of a run.

    `is_reply` is true for a reply of a chat, whose further fields for JSON are `fields`. `is_longest` is true if the
    context is as long as the model's learned positions.
    """

    completion: Completion
    is_reply: bool
    fields: dict[str, Any]
    n_ctx: int
    is_longest: bool
    stats: RunStats


@attrs.frozen
class Switch:
    """Chat with `model` that continues with the one `wanted`."""

    repl: Repl
    model: str
    wanted: str


def execute(options: RunOptions) -> str | None:
    """Load, generate, report; returns the stop reason, None after a chat."""
    with mcp_functions(options.chat.mcp) as functions:
        result = _run(options, functions, None)
        while isinstance(result, Switch):
            result = _switched(options, functions, result)
        return result


def _run(options: RunOptions, functions: Callable[[], Functions], repl: Repl | None) -> str | Switch | None:
    started = time.perf_counter()
    with load(
        options.model, options.mode, options.threads, options.lora, options.load_mode, options.overrides,
        options.mmproj, options.prompts, options.workers,
    ) as model:  # fmt: skip
        from llamacli.engine.packed_copies import finish_copies

        if options.prompt_cache is not None:
            from llamacli.kv.prompt_cache import MAX_BYTES, PromptCache

            model.prompt_cache = PromptCache(Path(options.prompt_cache), MAX_BYTES)
        result = _generate(options, functions, model, time.perf_counter() - started, repl)
        finish_copies()  # a model that is closed earlier leaves none
    if not isinstance(result, Result):
        return result
    _report(options, model, result)
    return result.completion.stop


def _switched(options: RunOptions, functions: Callable[[], Functions], switch: Switch) -> str | Switch | None:
    """Continue a chat with another model, or its own after an error.

    Adapters are those of the first model.
    """

    def with_model(name: str) -> RunOptions:
        same = name == options.model
        lora, mmproj = (options.lora, options.mmproj) if same else ((), None)
        return attrs.evolve(options, model=name, lora=lora, images=(), audio=(), mmproj=mmproj)

    try:
        return _run(with_model(switch.wanted), functions, switch.repl)
    except (LlamaCliError, OSError) as error:
        note(f"error: {one_line(error)}")
        return _run(with_model(switch.model), functions, switch.repl)


def _generate(
    options: RunOptions, functions: Callable[[], Functions], model: Model, load_s: float, repl: Repl | None
) -> Result | Switch | None:
    chats = options.chat.should_chat(model)
    if repl is not None and not chats:
        raise InvalidRequestError(f"{options.model} has no chat template")
    if (options.images or options.audio) and not chats:
        option = "--image" if options.images else "--audio"
        raise click.UsageError(f"{option} is for chats: this is a text completion, without a chat template.")
    if chats and options.ignore_eos:
        raise click.UsageError("--ignore-eos is for text completion: add --raw.")
    ids = [] if chats else _encode(model, options.prompt, continues=options.load_session is not None)
    seed = int.from_bytes(os.urandom(4)) if options.seed < 0 else options.seed
    warn_of_long_context(model, options.ctx_size)
    with (
        model.create_session(n_ctx=options.ctx_size or None, kv_type=options.kv_type, seed=seed) as session,
        open_drafter(
            model, session, options.lookup, options.draft, options.draft_max, options.mode, options.threads
        ) as drafter,
    ):
        if drafter is not None:
            drafter.begin(model)
            session.drafter = drafter
        params = sampling_params(
            options.sampling, model.metadata, session.n_ctx, model.find_sampler, model.added_samplers
        )
        _check(session, params)
        chat = None
        if chats:
            tools = _tools(options, functions)
            chat = options.chat.create_chat(model, session, options.max_tokens, tools)
        saved = session if chat is None else chat
        if options.load_session is not None and repl is None:
            saved.load(options.load_session)
        logged = _resumed(options, chat) if chat is not None and repl is None else None

        def log_start() -> None:
            _log.info("%s loaded in %.2f s; seed %d, %s", model, load_s, seed, params)

        completion, fields = None, {}
        if chat is None:
            continues_prompt = options.display_prompt and not model.program.has_encoder
            writer = CompletionWriter(options.prompt if continues_prompt else "")
            completion = complete(
                session, ids, params, max_tokens=options.max_tokens, ignore_eos=options.ignore_eos, on_start=log_start,
                writer=None if options.json else writer,
            )  # fmt: skip
        elif options.prompt or options.json or not at_terminal():
            completion = reply_once(
                chat, options.prompt, params, images=options.images, audio=options.audio, on_start=log_start,
                on_piece=None if options.json else shown(),
            )  # fmt: skip
            fields = reply_as_json(chat)
            if options.chat.log or logged is not None:
                number = None if logged is None else logged.id
                conversation_log().save(Conversation(options.model, chat.system, chat.variables, chat.history, number))
        else:
            repl = repl or _create_repl(options, chat, params, seed, logged)
            repl.attach(options.images, options.audio)
            wanted = repl.run(chat, params, options.model, _about(options, model, session))
            if wanted is not None:
                return Switch(repl, options.model, wanted)
        if options.save_session is not None:
            saved.save(options.save_session)
        if completion is None:
            return None
        stats = RunStats(load_s, session.stats, seed, model.program.timings.shares())
        is_longest = session.n_ctx == model.program.max_positions
        return Result(completion, chats, fields, session.n_ctx, is_longest, stats)


def _tools(options: RunOptions, of_servers: Callable[[], Functions]) -> Functions:
    own = load_functions(options.chat.tools) if options.chat.tools is not None else {}
    others = of_servers()
    if twice := own.keys() & others.keys():
        raise InvalidRequestError(f"--tools and --mcp both have a tool {min(twice)!r}")
    return {**own, **others}


def _create_repl(
    options: RunOptions,
    chat: ChatSession,
    params: SamplingParams,
    seed: int,
    logged: Conversation | None,
) -> Repl:
    if params.n_probs:
        raise click.UsageError("--logprobs is for one reply: give a prompt.")
    from llamacli.cli.repl import Repl
    from llamacli.cli.repl_settings import Settings

    log = options.chat.log or logged is not None
    settings = Settings(chat, params, seed=seed, verbose=options.stats, log=log, draft_max=options.draft_max)
    return Repl(settings, shift=options.chat.context_shift, logged=logged)


def _check(session: Session, params: SamplingParams) -> None:
    """Check sampling parameters early; errors of grammars and schemas have examples."""
    try:
        session.params = params
    except InvalidRequestError as error:
        example = next((text for name, text in _EXAMPLES.items() if str(error).startswith(f"{name}:")), "")
        raise InvalidRequestError(f"{error}{example}") from error


def _resumed(options: RunOptions, chat: ChatSession) -> Conversation | None:
    if options.chat.resume is None:
        return None
    conversation = conversation_log().load(options.chat.resume or None)
    chat.system, chat.history[:] = chat.system or conversation.system, conversation.messages
    chat.variables = {**conversation.variables, **chat.variables}
    return conversation


def _about(options: RunOptions, model: Model, session: Session) -> dict[str, str]:
    names = (model.metadata.get(f"general.{key}") for key in ("name", "size_label"))
    adapters = [f"{adapter.path.name}:{scale:g}" for adapter, scale in session.adapters]
    return {
        "name": ", ".join(str(name) for name in names if name) or "(none)",
        "type": f"{model.arch}, {model.config.n_layer} layers, mode {model.mode.value}, cache {session.cache.kv_type}",
        "template": options.chat.about_template(model),
    } | ({"lora": ", ".join(adapters)} if adapters else {})


def _encode(model: Model, text: str, *, continues: bool) -> list[int]:
    """Encode the prompt; that of a saved session gets no BOS."""
    if continues:
        return model.tokenizer.encode_run(text, continues=True)
    ids = model.encode_prompt(text, parse_special=True)
    if not ids:
        raise InvalidRequestError("this model has no BOS token to start a text with: give a prompt")
    return ids


def _report(options: RunOptions, model: Model, result: Result) -> None:
    completion = result.completion
    logprobs = bool(options.sampling["logprobs"])
    if options.json:
        print_json(_as_json(options, model, result), indent=None)
    elif not completion.text.endswith("\n"):
        write("\n")
    if options.html is not None:
        write_heat(Path(options.html), model, "" if result.is_reply else options.prompt, completion)
    elif logprobs and not options.json:
        print_logprobs(model, completion)
    if completion.stop == "context":
        remedy = "the model has learned no further positions" if result.is_longest else "-c sets a longer one"
        note(f"llamacli: the context of {result.n_ctx} tokens is full; {remedy}")
    if options.stats:
        result.stats.print()


def _as_json(options: RunOptions, model: Model, result: Result) -> dict[str, Any]:
    completion = result.completion
    logprobs = {"logprobs": logprobs_as_json(model, completion)} if options.sampling["logprobs"] else {}
    return {
        "model": options.model,
        "arch": model.arch,
        "prompt": options.prompt,
        "text": completion.text,
        **result.fields,
        "tokens": completion.tokens,
        **logprobs,
        "stop": completion.stop,
        "stats": result.stats.as_dict(),
    }
