"""`llamacli run`: a prompt in, its continuation out."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from llamacli.cli.chat import Wishes, at_terminal, chat_options, reply_as_json, reply_once, show
from llamacli.cli.heat import write_heat
from llamacli.cli.hub import REFERENCE, model_from_hub
from llamacli.cli.interrupts import EXIT_CODE
from llamacli.cli.logprobs import logprobs_as_json, print_logprobs
from llamacli.cli.options import MOST_TOKENS, PATH, global_options, kv_type_options, mode_option, threads_option
from llamacli.cli.output import note, print_json, write
from llamacli.cli.progress import bar, load
from llamacli.cli.sampling import sampling_options, sampling_params
from llamacli.cli.text import argument, read_file, read_stdin, without_final_newline
from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.tools.demo import demo_path
from llamacli.util.files import check_target

if TYPE_CHECKING:
    from llamacli import ChatSession, Model, Session

_log = logging.getLogger(__name__)


@click.command()
@click.argument("first", required=False, metavar="[MODEL]", type=PATH)
@click.argument("second", required=False, metavar="[PROMPT]")
@click.option("-m", "--model", type=PATH, help="The model's file, instead of MODEL.")
@click.option(
    "-hf", "--hf-repo", metavar=REFERENCE, allow_from_autoenv=False,
    help="A model of the Hugging Face hub, instead of MODEL; downloaded if it is not in the cache.",
)  # fmt: skip
@click.option("-p", "--prompt", metavar="TEXT", allow_from_autoenv=False, help="The prompt.")
@click.option("-f", "--file", type=PATH, allow_from_autoenv=False, help="Read the prompt from a file.")
@click.option(
    "-n",
    "--max-tokens",
    "--n-predict",
    metavar="N",
    type=click.IntRange(-1),
    default=-1,
    show_default=True,
    help="Write at most this many tokens; -1: until the text ends or the context is full.",
)
@click.option(
    "-c",
    "--ctx-size",
    metavar="N",
    type=click.IntRange(0, MOST_TOKENS),
    default=0,
    show_default=True,
    help="Length of the context in tokens, the prompt included; 0: the model's.",
)
@threads_option
@click.option(
    "-s",
    "--seed",
    metavar="N",
    type=click.IntRange(-1, (1 << 32) - 1),
    default=-1,
    show_default=True,
    help="Seed of the draws; -1: another one each time.",
)
@sampling_options
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would end the text.")
@chat_options
@click.option(
    "--display-prompt/--no-display-prompt",
    default=True,
    help="Whether a text that continues the prompt begins with it; by default it does.",
)
@mode_option
@kv_type_options("f32 in mode fp32, else f16")
@click.option(
    "--load-session", type=PATH, help="Go on from what --save-session has saved: evaluate nothing of it again."
)
@click.option(
    "--save-session", type=PATH, help="Save the session at the end, so that --load-session can go on from it."
)
@click.option("--stats", is_flag=True, help="Show times, speeds, memory and the seed on stderr at the end.")
@click.option("--json", is_flag=True, help="Print one JSON object at the end instead of the text.")
@click.option(
    "--html", type=PATH, allow_from_autoenv=False, metavar="OUT.html",
    help="With --logprobs: write a page with each token coloured by its probability, alternatives on hover.",
)  # fmt: skip
@global_options
@click.pass_context
def run(
    ctx: click.Context,
    /,
    first: str | None,
    second: str | None,
    model: str | None,
    hf_repo: str | None,
    prompt: str | None,
    file: str | None,
    max_tokens: int,
    ctx_size: int,
    threads: int | None,
    seed: int,
    ignore_eos: bool,
    display_prompt: bool,
    mode: str,
    kv_type: str | tuple[str, str] | None,
    load_session: str | None,
    save_session: str | None,
    stats: bool,
    json: bool,
    html: str | None,
    **sampling: Any,
) -> None:
    """Chat with MODEL, or continue PROMPT.

    A model whose file has a chat template replies to the prompt, which may also be piped in; at a terminal without a
    prompt it converses, and /help says how. Other models, and all with --raw, continue the prompt; without one they
    begin a text of their own. Without MODEL, a small demo model writes. The text goes to stdout, everything else, as
    the model's reasoning, to stderr.

    Special tokens spelled in the prompt are read as such with --raw, and as text when chatting. A newline at the end of
    a file or of stdin is not part of the prompt.
    """
    if html is not None:
        if not sampling["logprobs"]:
            raise click.UsageError("--html shows log-probabilities: add --logprobs N.")
        check_target(Path(html), overwrite=True)
    if save_session is not None:
        check_target(Path(save_session), overwrite=True)
    wishes = Wishes.taken_from(sampling)
    named = model is not None and ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE
    if named or hf_repo is not None:
        if second is not None or (named and hf_repo is not None):
            raise click.UsageError("MODEL, -m and -hf exclude each other.")
        second = first
    elif first is not None:
        if second is prompt is file is None and not Path(first).exists():
            raise ModelFormatError(f"{first}: no such file (a prompt for the demo model is given with -p)")
        model = first
    if model is None:  # an empty name is one that cannot be opened
        model = str(demo_path())
    text = _prompt(second, prompt, file)
    if hf_repo is not None:
        model = model_from_hub(hf_repo)

    from llamacli.cli.generate import TextAfterPrompt, complete
    from llamacli.cli.stats import Figures

    started = time.perf_counter()
    with load(model, mode, threads) as loaded:
        load_s = time.perf_counter() - started
        chats = wishes.lead_to_chat(loaded)
        if chats and ignore_eos:
            raise click.UsageError("--ignore-eos is for text that is continued: add --raw.")
        ids = [] if chats else _encode(loaded, text, goes_on=load_session is not None)
        seed = int.from_bytes(os.urandom(4)) if seed < 0 else seed
        if ctx_size > loaded.config.context_length:
            _log.warning("-c %d: the model was trained for %d tokens only", ctx_size, loaded.config.context_length)
        with (
            loaded.create_session(seq_len=ctx_size or None, kv_type=kv_type, seed=seed) as session,
            bar("reading the prompt") as session.progress,
        ):
            params = sampling_params(sampling, loaded.metadata, session.seq_len, loaded.find_sampler)

            def begin() -> None:
                _log.info("%s loaded in %.2f s; seed %d, %s", loaded, load_s, seed, params)

            parts: dict[str, Any] = {}
            stream: ChatSession | Session
            if chats:
                stream = chat = wishes.chat(loaded, session, max_tokens)
                if load_session is not None:
                    chat.load(load_session)
                if not text and not json and at_terminal():
                    if params.n_probs:
                        raise click.UsageError("--logprobs is for one reply: give a prompt.")
                    from llamacli.cli.repl import Repl

                    Repl(chat, params, shift=wishes.shift, stats=stats, model=model).run()
                    if save_session is not None:
                        chat.save(save_session)
                    return
                completion = reply_once(chat, text, params, on_start=begin, on_piece=None if json else show)
                parts = reply_as_json(chat)
            else:
                stream = session
                if load_session is not None:
                    session.load(load_session)
                completion = complete(
                    session,
                    ids,
                    params,
                    max_tokens=max_tokens,
                    ignore_eos=ignore_eos,
                    on_start=begin,
                    sink=None if json else TextAfterPrompt(text if display_prompt else "", len(ids)),
                )
            if save_session is not None:
                stream.save(save_session)
            figures = Figures(load_s, session.stats, seed)
        if json:
            logprobs = {"logprobs": logprobs_as_json(loaded, completion)} if params.n_probs else {}
            print_json(
                {
                    "model": model,
                    "arch": loaded.arch,
                    "prompt": text,
                    "text": completion.text,
                    **parts,
                    "tokens": completion.tokens,
                    **logprobs,
                    "stop": completion.stop,
                    "stats": figures.as_dict(),
                },
                indent=None,
            )
    if not json and not completion.text.endswith("\n"):
        write("\n")
    if html is not None:
        write_heat(Path(html), loaded, "" if chats else text, completion)
    elif not json and params.n_probs:
        print_logprobs(loaded, completion)
    if completion.stop == "context":
        note(f"llamacli: the context of {session.seq_len} tokens is full; -c sets a longer one")
    if stats:
        figures.print()
    if completion.stop == "interrupt":
        ctx.exit(EXIT_CODE)


def _prompt(positional: str | None, option: str | None, file: str | None) -> str:
    """The prompt, from wherever it was given; "" for none."""
    given = [text for text in (positional, option, file) if text is not None]
    if len(given) > 1:
        raise click.UsageError("Give one prompt only: PROMPT, -p or -f.")
    if not given:
        return without_final_newline(read_stdin() or "")
    text = argument(given[0]) if file is None else without_final_newline(read_file(Path(file)))
    if not text:
        raise InvalidRequestError("the prompt is empty; without one the model begins a text of its own")
    return text


def _encode(model: Model, text: str, *, goes_on: bool) -> list[int]:
    """The prompt's tokens: after BOS where the model wants it, but never with an EOS that would end it.

    A text that goes on from a saved one has neither, nor a space of its own.
    """
    if goes_on:
        return model.tokenizer.encode_run(text, continues=True)
    ids = model.tokenizer.encode_prompt(text, parse_special=True)
    if not ids:
        raise InvalidRequestError("this model has no token to begin a text with: give a prompt")
    return ids
