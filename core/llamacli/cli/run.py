"""`llamacli run`: chat or text completion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from llamacli.cli import options
from llamacli.cli.chat import ChatOptions, chat_options
from llamacli.cli.command import Command, in_group
from llamacli.cli.hub import REFERENCE, model_from_hub
from llamacli.cli.interrupts import EXIT_CODE
from llamacli.cli.numbers import Integer
from llamacli.cli.options import PATH, option
from llamacli.cli.overrides import override_options, pop_overrides
from llamacli.cli.sampling import FIELDS, check_constraint, sampling_options
from llamacli.cli.speculation import speculation_options
from llamacli.cli.text import argument, read_file, read_stdin, unescaped, without_final_newline
from llamacli.cli.workers import pop_workers, worker_options
from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.hub.demo import demo_path
from llamacli.util.files import check_target
from llamacli.util.settings import MAX_CONTEXT

if TYPE_CHECKING:
    from llamacli.hub.personas import Persona

_INPUTS = ("grammar_file", "json_schema_file", "tools", "mcp", "load_session")
"""Options with files that are read once the model is loaded."""


@click.command(cls=Command)
@click.argument("first", required=False, metavar="[MODEL]", type=PATH)
@click.argument("second", required=False, metavar="[PROMPT]")
@in_group(
    "Model and prompt",
    option("-m", "--model", type=PATH, help="Model file or short name, instead of MODEL."),
    option(
        "-hf", "--hf-repo", metavar=REFERENCE, allow_from_autoenv=False,
        help="Model of the Hugging Face hub, instead of MODEL; downloaded unless cached.",
    ),
    options.lora_option,
    option(
        "--image", "images", type=PATH, multiple=True, allow_from_autoenv=False, metavar="FILE",
        help="Show the model a picture before the prompt; may be given several times.",
    ),
    option(
        "--audio", type=PATH, multiple=True, allow_from_autoenv=False, metavar="FILE",
        help="Let the model hear sound before the prompt; may be given several times.",
    ),
    options.mmproj_option,
    option("-p", "--prompt", metavar="TEXT", allow_from_autoenv=False, help="Prompt text; see --escape."),
    option("-f", "--file", type=PATH, allow_from_autoenv=False, help="Read the prompt from a file; -: from stdin."),
    option(
        "-e", "--escape/--no-escape", default=True,
        help="Process escapes such as \\n in -p, --stop and --dry-sequence-breaker; default: on.",
    ),
)  # fmt: skip
@in_group(
    "Context and length",
    option(
        "-n", "--max-tokens", "--predict", "--n-predict", metavar="N", type=Integer(-1), default=-1, show_default=True,
        help="Maximum number of tokens to generate; -1: until the text ends or the context is full.",
    ),
    option(
        "-c", "--ctx-size", metavar="N", type=Integer(0, MAX_CONTEXT), default=0, show_default=True,
        help="Context length in tokens, prompt included; 0: that of the model.",
    ),
    option("--ignore-eos", is_flag=True, help="Ignore end-of-generation tokens and continue."),
    option(
        "--load-session", type=PATH,
        help="Continue a session file of --save-session without evaluating its tokens again.",
    ),
    option("--save-session", type=PATH, help="Save the session to a file at the end, for --load-session."),
    option(
        "--prompt-cache", metavar="DIR", type=PATH,
        help="Keep the beginnings of texts in this folder, up to 4 GiB, and read those of new ones from it.",
    ),
)  # fmt: skip
@in_group(
    "Sampling",
    option(
        "-s", "--seed", metavar="N", type=Integer(-1, (1 << 32) - 1), default=-1, show_default=True,
        help="Random seed for sampling; -1: a new one each time.",
    ),
)  # fmt: skip
@sampling_options
@chat_options
@speculation_options
@in_group(
    "Output",
    option(
        "--display-prompt/--no-display-prompt", default=True,
        help="Print the prompt before its continuation; default: on.",
    ),
    option("--stats", is_flag=True, help="Print times, speeds, memory and the seed to stderr at the end."),
    option("--json", is_flag=True, help="Print one JSON object at the end instead of text."),
    option(
        "--logprobs", type=Integer(0), default=0, show_default=True, metavar="N",
        help="Print the log-probabilities of each token and of the N most likely ones; 0: off.",
    ),
    option(
        "--html", type=PATH, allow_from_autoenv=False, metavar="OUT.html",
        help="With --logprobs: write an HTML page with tokens coloured by probability, alternatives on hover.",
    ),
)  # fmt: skip
@in_group(
    "Computing",
    options.threads_option,
    options.mode_option,
    options.load_option,
    options.prompts_option,
    options.kv_type_options("f32 in mode fp32, else f16"),
)
@worker_options
@override_options
@options.global_options
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
    **given: Any,
) -> None:
    """Chat with MODEL, or continue PROMPT.

    MODEL is a GGUF file, or a short name such as `family:8b` of a model of the Hugging Face hub, which is downloaded
    unless cached; `llamacli list --names` prints the names.

    A model whose file has a chat template replies to PROMPT; at a terminal without a prompt it starts a chat, in which
    /help lists the commands. Other models continue PROMPT, and with --raw all do; without PROMPT they begin a text.
    Text from a pipe or a file at stdin comes before PROMPT, with an empty line between them. Without MODEL, a small
    demo model continues PROMPT or tells a story; its name is `demo`, and with this name it chats. Text goes to stdout,
    everything else, such as reasoning, to stderr.

    Special tokens in the prompt are parsed with --raw and are plain text in a chat. A final newline of a file or of
    stdin is not part of the prompt.
    """
    _check_outputs(**given)
    check_constraint(given)
    for name in _INPUTS:
        if given[name] is not None:
            Path(given[name]).open("rb").close()  # an error now, and not once the model is loaded
    for path in (*(adapter for adapter, _ in given["lora"]), *given["images"], *given["audio"]):
        Path(path).open("rb").close()
    given["workers"] = pop_workers(given, "lora", "prompt_cache", "load_session", "save_session")
    chat, overrides = ChatOptions.pop_from(given), pop_overrides(given)
    named = model is not None and ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE
    if named or hf_repo is not None:
        if second is not None or (named and hf_repo is not None):
            raise click.UsageError("MODEL, -m and -hf exclude each other.")
        second = first
    elif first is not None:
        if second is prompt is file is None and " " in first and not Path(first).exists():
            raise ModelFormatError(f"{first}: no such file (a prompt for the demo model: llamacli run demo PROMPT)")
        model = first
    if model is None:  # but "" is a name, of a file that cannot be opened
        model = str(demo_path())
        chat = chat._replace(raw=chat.raw or not chat.requested)
    else:
        from llamacli.hub.personas import persona

        own = persona(model)
        chat = chat if own is None else _with_persona(ctx, own, chat, given)
    text = _prompt(second, prompt, file, escape=given["escape"])
    if hf_repo is not None:
        model = model_from_hub(hf_repo)

    from llamacli.cli.runner import RunOptions, execute

    if execute(RunOptions.pop_from(given, model=model, prompt=text, chat=chat, overrides=overrides)) == "interrupt":
        ctx.exit(EXIT_CODE)


def _with_persona(ctx: click.Context, own: Persona, chat: ChatOptions, given: dict[str, Any]) -> ChatOptions:
    """Chat options with those of a persona.

    Its parameters go into `given` where the command line has none.
    """
    more = {"seed": own.seed, "max_tokens": own.max_tokens, "stop": own.stop or None, **own.sampling}
    names = {field: name for name, field in FIELDS.items() if name in given} | {name: name for name in given}
    for field, value in more.items():
        name = names[field]
        if value is not None and ctx.get_parameter_source(name) in (ParameterSource.DEFAULT, None):
            given[name] = value
    return chat._replace(
        system=chat.system or own.system, template=chat.template or own.template or None, requested=chat.requested
    )


def _check_outputs(*, html: str | None, logprobs: int, save_session: str | None, **_: Any) -> None:
    if html is not None:
        if not logprobs:
            raise click.UsageError("--html shows log-probabilities: add --logprobs N.")
        check_target(Path(html), overwrite=True)
    if save_session is not None:
        check_target(Path(save_session), overwrite=True)


def _prompt(positional: str | None, option: str | None, file: str | None, *, escape: bool) -> str:
    given = [text for text in (positional, option, file) if text is not None]
    if len(given) > 1:
        raise click.UsageError("Give one prompt only: PROMPT, -p or -f.")
    piped = without_final_newline(read_stdin() or "")
    if not given or file == "-":
        return piped
    if file is not None:
        text = without_final_newline(read_file(Path(file)))
    elif option is not None and escape:
        text = unescaped(argument(option))
    else:
        text = argument(given[0])
    if not text and not piped:
        raise InvalidRequestError("the prompt is empty; leave it out to generate text without a prompt")
    return "\n\n".join(filter(None, (piped, text)))
