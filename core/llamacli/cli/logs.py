"""`llamacli logs`: the log of conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llamacli.cli.command import Command
from llamacli.cli.numbers import Integer
from llamacli.cli.options import global_options, option
from llamacli.cli.output import local_minute, note, print_json, print_table, write

if TYPE_CHECKING:
    from llamacli.cli.conversations import Conversation

_TITLE = 50
"""Characters of a title in the table."""


@click.command(cls=Command)
@click.argument("query", required=False)
@option("-n", "--limit", metavar="N", type=Integer(1), default=20, show_default=True, help="Number of conversations.")
@option("--show", metavar="ID", type=Integer(1), help="Print this conversation.")
@option("--rm", metavar="ID", type=Integer(1), help="Delete this conversation.")
@option("--path", is_flag=True, help="Print the path of the database.")
@option("--json", is_flag=True, help="Print JSON.")
@global_options
def logs(query: str | None, limit: int, show: int | None, rm: int | None, path: bool, json: bool) -> None:
    """List the logged conversations.

    With QUERY, only those that have this text in a message. The latest come first. `llamacli run --log` records a
    conversation, as does `/set log on` in a chat and, for all of them, the environment variable LLAMACLI_RUN_LOG=1.
    `run --resume ID` and `/resume ID` continue it.
    """
    if sum((show is not None, rm is not None, path)) > 1:
        raise click.UsageError("--show, --rm and --path exclude each other.")
    from llamacli.cli.conversations import conversation_log

    log = conversation_log()
    if path:
        click.echo(log.path)
    elif rm is not None:
        log.remove(rm)
        note(f"conversation {rm} deleted")
    elif show is not None:
        _print(log.load(show), json)
    else:
        found = log.search(query or "", limit)
        if json:
            print_json([_as_json(conversation) for conversation in found])
        elif found:
            print_table(("id:", "updated", "model", "messages:", "first message"), list(map(_row, found)))
        else:
            note("no conversation has this text" if query else "no conversations; llamacli run --log records them")


def _row(conversation: Conversation) -> tuple[str, ...]:
    model = conversation.model.replace("\\", "/").rpartition("/")[2]
    title = conversation.title
    title = title if len(title) <= _TITLE else f"{title[: _TITLE - 3]}..."
    return str(conversation.id), local_minute(conversation.updated), model, str(len(conversation.messages)), title


def _print(conversation: Conversation, json: bool) -> None:
    if json:
        print_json(_as_json(conversation))
        return
    if conversation.system:
        write(f"system: {conversation.system}\n\n")
    write("\n\n".join(f"{message.role}: {message.content}" for message in conversation.messages) + "\n")


def _as_json(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "model": conversation.model,
        "updated": conversation.updated,
        "system": conversation.system,
        "variables": conversation.variables,
        "messages": [message.as_dict() for message in conversation.messages],
    }
