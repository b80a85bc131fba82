"""`llamacli completion`: shell completion scripts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from llamacli.cli.command import Command
from llamacli.cli.options import global_options


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@global_options
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    It completes commands, options, their values and file names in bash, zsh or fish.

    bash, in ~/.bashrc: `eval "$(llamacli completion bash)"`; zsh, in ~/.zshrc below compinit:
    `eval "$(llamacli completion zsh)"`; fish, once:
    `llamacli completion fish > ~/.config/fish/completions/llamacli.fish`.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these three"
    script = kind(ctx.find_root().command, {}, "llamacli", "_LLAMACLI_COMPLETE")
    click.echo(script.source_template % script.source_vars())
