"""The `llamacli` command: its subcommands, those of plugins, and what errors look like."""

from __future__ import annotations

import functools
import traceback
from typing import Any

import click
from click.exceptions import Exit

from llamacli.cli.bench import bench
from llamacli.cli.completion import completion
from llamacli.cli.doctor import doctor
from llamacli.cli.embed import embed
from llamacli.cli.hub import list_models, pull, rm
from llamacli.cli.inspect import inspect
from llamacli.cli.interrupts import EXIT_CODE
from llamacli.cli.options import DEBUG, global_options, log_to_stderr
from llamacli.cli.output import abandon_stdout, note, one_line
from llamacli.cli.perplexity import perplexity
from llamacli.cli.plugins import plugin_commands, plugins
from llamacli.cli.quantize import quantize
from llamacli.cli.run import run
from llamacli.cli.tokenize import tokenize
from llamacli.cli.warmup import warmup
from llamacli.errors import LlamaCliError


class App(click.Group):
    """A group that asks plugins for the commands it lacks, and ends every error in one line and an exit code."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name. Plugins are loaded only for one that is not built in: never for help."""
        command = super().get_command(ctx, cmd_name)
        if command is None and not ctx.resilient_parsing and not cmd_name.startswith("-"):
            command = plugin_commands().get(cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments name."""
        if args[0].endswith(".gguf") and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}. To run a model: llamacli run {args[0]}")
        return super().resolve_command(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments; from here on log records are shown."""
        log_to_stderr()
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            note("")  # ends the line in which the terminal shows ^C
            raise Exit(EXIT_CODE) from None
        except BrokenPipeError:
            # The reader has all it wants. Programs that SIGPIPE ends die silently with what shells call 141.
            abandon_stdout()
            raise Exit(141) from None
        except (LlamaCliError, OSError, MemoryError) as error:
            if ctx.meta.get(DEBUG):
                click.echo(traceback.format_exc(), err=True, nl=False)
            note(f"llamacli: error: {one_line(error)}")
            if isinstance(error, OSError):
                abandon_stdout()  # it may be stdout itself that failed
            raise Exit(1) from None


@click.group(
    cls=App,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "LLAMACLI",
        "max_content_width": 100,
    },
    epilog="Plugins may add commands: `llamacli plugins` shows them. Options can be set by environment "
    "variables too: LLAMACLI_RUN_TEMP is `run --temp`.",
)
@click.version_option(package_name="llamacli", allow_from_autoenv=False)
@functools.partial(global_options, env=True)
def app() -> None:
    """Run large language models on CPUs: GGUF in, text out."""


for command in (
    run, inspect, tokenize, embed, quantize, bench, perplexity, pull, list_models, rm, plugins, warmup, doctor,
    completion,
):  # fmt: skip
    app.add_command(command)
