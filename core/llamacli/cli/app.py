"""The `llamacli` command: subcommands and error reporting."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import click
from click.exceptions import Exit
from click.shell_completion import CompletionItem

from llamacli.cli.commands import Commands
from llamacli.cli.interrupts import EXIT_CODE
from llamacli.cli.options import DEBUG, global_options, log_to_stderr
from llamacli.cli.output import ClosedStdout, at_words, discard_stdout, note, one_line
from llamacli.errors import LlamaCliError, lacks_memory

ELSEWHERE = {
    "show": "inspect MODEL", "ls": "list", "chat": "run MODEL",
    "cli": "run MODEL", "generate": "run MODEL PROMPT", "completions": "completion bash", "server": "serve MODEL",
    "remove": "rm USER/REPO", "delete": "rm USER/REPO", "download": "pull USER/REPO", "embedding": "embed MODEL TEXT",
    "rerank": "rank MODEL QUERY TEXT", "models": "list", "search": "list --names", "info": "inspect MODEL",
    "tui": "run MODEL", "launch": "serve MODEL", "get": "pull USER/REPO",
    "split": "quantize MODEL OUT COPY --split-max-size 4G", "merge": "quantize SHARD OUT COPY",
    "help": "--help", "version": "--version",
}  # fmt: skip
"""Commands of other programs, and those here instead of them."""

WITHOUT = {
    "ps": "each command loads its own model; `llamacli serve` lists what is loaded under /models and /api/ps",
    "stop": "a model ends with its command; Ctrl-C ends `llamacli serve`",
    "cp": "models are files: copy the file, or give a model a name: llamacli create NAME --from MODEL",
    "push": "models are files; `hf upload` of huggingface_hub uploads them",
    "login": "set HF_TOKEN, or run `hf auth login` of huggingface_hub",
}
"""Commands of other programs without an equal here, and what to do instead."""


class App(click.Group):
    """Command group: commands load when run, errors become one line."""

    commands: Commands

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line on each command; none is imported."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._help_line(name, limit)) for name in self.commands])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands; none is imported."""
        names = [name for name in self.commands if name.startswith(incomplete)]
        items = [CompletionItem(name, help=self._help_line(name, 80)) for name in names]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def _help_line(self, name: str, limit: int) -> str:
        return click.Command(name, help=self.commands.help_line(name)).get_short_help_str(limit)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command from the arguments."""
        name = args[0]
        if name not in self.commands and not ctx.resilient_parsing:
            if name.endswith(".gguf"):
                ctx.fail(f"No such command {name!r}. To run a model: llamacli run {name}")
            if name in ELSEWHERE:
                ctx.fail(f"No such command {name!r}. Here: llamacli {ELSEWHERE[name]}")
            if name in WITHOUT:
                ctx.fail(f"No such command {name!r}: {WITHOUT[name]}.")
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
    try:
        yield
    except KeyboardInterrupt as interrupt:
        note("\n".join(["", *getattr(interrupt, "__notes__", ())]))  # behind the line in which the terminal shows ^C
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
    except Exception as error:
        if not isinstance(error, (LlamaCliError, OSError)) and not lacks_memory(error):
            raise
        if ctx is not None and ctx.meta.get(DEBUG):
            click.echo(traceback.format_exc(), err=True, nl=False)
        note(f"llamacli: error: {one_line(error)}")
        if isinstance(error, OSError) and not isinstance(error, LlamaCliError):
            discard_stdout()  # it may be stdout itself that failed
        raise Exit(1) from None


@click.group(
    cls=App,
    commands=Commands(),
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "LLAMACLI",
        "max_content_width": 100,
    },
    epilog="Environment variables set options: LLAMACLI_RUN_TEMPERATURE is `run --temperature`. `llamacli plugins` "
    "lists the commands that plugins bring.",
)
@click.version_option(package_name="llamacli-core", allow_from_autoenv=False)
@functools.partial(global_options, env=True)
def app() -> None:
    """Run large language models in GGUF files on CPUs."""
