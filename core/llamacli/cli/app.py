"""The `llamacli` command: subcommands, plugin commands, error reporting."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import click
from click.exceptions import Exit

from llamacli.cli.bench import bench
from llamacli.cli.completion import completion
from llamacli.cli.doctor import doctor
from llamacli.cli.embed import embed
from llamacli.cli.hub import list_models, pull, rm
from llamacli.cli.imatrix import imatrix
from llamacli.cli.inspect import inspect
from llamacli.cli.interrupts import EXIT_CODE
from llamacli.cli.logs import logs
from llamacli.cli.options import DEBUG, global_options, log_to_stderr
from llamacli.cli.output import ClosedStdout, at_words, discard_stdout, note, one_line
from llamacli.cli.perplexity import perplexity
from llamacli.cli.plugins import plugin_commands, plugins
from llamacli.cli.quantize import quantize
from llamacli.cli.run import run
from llamacli.cli.serve import serve
from llamacli.cli.tokenize import tokenize
from llamacli.cli.trace import trace
from llamacli.cli.warmup import warmup
from llamacli.errors import LlamaCliError

ELSEWHERE = {
    "show": "inspect MODEL", "create": "quantize MODEL OUT TYPE", "ls": "list", "chat": "run MODEL",
    "cli": "run MODEL", "generate": "run MODEL PROMPT", "completions": "completion bash", "server": "serve MODEL",
    "remove": "rm USER/REPO", "delete": "rm USER/REPO", "download": "pull USER/REPO", "embedding": "embed MODEL TEXT",
    "help": "--help", "version": "--version",
}  # fmt: skip
"""Commands of other programs, and those here instead of them."""


class App(click.Group):
    """Command group with plugin commands.

    Turns errors into one line and an exit code.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Look up a command.

        Plugins are loaded only for a name that is not built in, so never for help.
        """
        command = super().get_command(ctx, cmd_name)
        if command is None and not ctx.resilient_parsing and not cmd_name.startswith("-"):
            command = plugin_commands().get(cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command from the arguments."""
        name = args[0]
        if name not in self.commands and not ctx.resilient_parsing:
            if name.endswith(".gguf"):
                ctx.fail(f"No such command {name!r}. To run a model: llamacli run {name}")
            if name in ELSEWHERE and self.get_command(ctx, name) is None:
                ctx.fail(f"No such command {name!r}. Here: llamacli {ELSEWHERE[name]}")
        return super().resolve_command(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments, with logging to stderr set up; report errors."""
        log_to_stderr()
        if sys.stdout is None:
            sys.stdout = ClosedStdout()
        with _reported(None):  # --help and --version write to stdout
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and report errors."""
        with _reported(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def _reported(ctx: click.Context | None) -> Iterator[None]:
    """Turn errors into one line and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        note("")  # ends the line in which the terminal shows ^C
        raise Exit(EXIT_CODE) from None
    except BrokenPipeError:
        # Programs that SIGPIPE ends die silently; shells report 141.
        discard_stdout()
        raise Exit(141) from None
    except click.UsageError as error:
        message = error.format_message()
        if type(error).show is not click.UsageError.show or "\n" in message:
            raise  # help, and messages that have lines
        raise click.UsageError(at_words(f"Error: {message}").removeprefix("Error: "), error.ctx) from None
    except (LlamaCliError, OSError, MemoryError) as error:
        if ctx is not None and ctx.meta.get(DEBUG):
            click.echo(traceback.format_exc(), err=True, nl=False)
        note(f"llamacli: error: {one_line(error)}")
        if isinstance(error, OSError) and not isinstance(error, LlamaCliError):
            discard_stdout()  # it may be stdout itself that failed
        raise Exit(1) from None


@click.group(
    cls=App,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "LLAMACLI",
        "max_content_width": 100,
    },
    epilog="Plugins can add commands; `llamacli plugins` lists them. Environment variables set options: "
    "LLAMACLI_RUN_TEMPERATURE is `run --temperature`.",
)
@click.version_option(package_name="llamacli", allow_from_autoenv=False)
@functools.partial(global_options, env=True)
def app() -> None:
    """Run large language models in GGUF files on CPUs."""


for command in (
    run, serve, inspect, tokenize, embed, quantize, imatrix, bench, perplexity, pull, list_models, rm, logs, plugins,
    warmup, doctor,
    completion, trace,
):  # fmt: skip
    app.add_command(command)
