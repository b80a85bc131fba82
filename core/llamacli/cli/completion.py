"""`llamacli completion`: what a shell has to know to complete the command line."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from llamacli.cli.options import global_options


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@global_options
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets SHELL (bash, zsh or fish) complete commands, options, their values and files' names.

    bash, in ~/.bashrc: `eval "$(llamacli completion bash)"`; zsh, in ~/.zshrc: `eval "$(llamacli completion zsh)"`;
    fish, once: `llamacli completion fish > ~/.config/fish/completions/llamacli.fish`.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these three"
    made = kind(ctx.find_root().command, {}, "llamacli", "_LLAMACLI_COMPLETE")
    click.echo(made.source_template % made.source_vars())
