"""Record transformers' chat templates: `python tests/oracle/record_templates.py`, where transformers is installed.

Saves the SHA-256 of each rendering. Templates are those of `chat_cases.SYNTHETIC` and the files in
../shared/templates.
"""

import contextlib
import hashlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils import chat_template_utils

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from chat_cases import SYNTHETIC  # noqa: E402
from llamacli.testing.chats import BOS, CASES, EOS, NOW  # noqa: E402

GOLDENS = ROOT / "tests" / "goldens" / "chat_templates.json"


def render(template: str, *, messages: list[dict[str, Any]], **options: Any) -> str:
    """Rendering by transformers' `apply_chat_template`."""
    (text,), _ = chat_template_utils.render_jinja_template(
        [messages], chat_template=template, bos_token=BOS, eos_token=EOS, **options
    )
    return text


def shows_tools(template: str, tools: list[dict[str, Any]]) -> bool:
    """True if a template renders tools, or calls of them."""
    name = tools[0]["function"]["name"]
    calling = CASES["call and result"]["messages"]
    for conversation, given in ((CASES["single turn"]["messages"], tools), (calling, None)):
        with contextlib.suppress(jinja2.TemplateError, TypeError):
            if name in render(template, messages=conversation, tools=given):
                return True
    return False


def record(template: str, case: dict[str, Any]) -> str:
    """Hash of a rendering, "no tools" or "refused".

    A system message that it refuses or leaves out is put in front of the first user's, and a null content beside calls
    that it refuses is made an empty text.
    """
    messages = case["messages"]
    if "tools" in case and not shows_tools(template, case["tools"]):
        return "no tools"
    try:
        text = render(template, **case)
    except (jinja2.TemplateError, TypeError):
        try:
            filled = [{**message, "content": message["content"] or ""} for message in messages]
            text = render(template, **(case | {"messages": filled}))
        except (jinja2.TemplateError, TypeError):
            text = ""
    if messages[0]["role"] == "system" and messages[0]["content"][:10] not in text:
        first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
        text = render(template, **(case | {"messages": [first, *messages[2:]]}))
    if not text:
        return "refused"
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    """Write the goldens."""
    chat_template_utils.datetime = types.SimpleNamespace(now=lambda: NOW)
    files = {path.name: path.read_text() for path in sorted((ROOT.parent / "shared" / "templates").glob("*.jinja"))}
    goldens = {
        name: {
            "source": hashlib.sha256(source.encode()).hexdigest(),
            "renderings": {label: record(source, case) for label, case in CASES.items()},
        }
        for name, source in (SYNTHETIC | files).items()
    }
    GOLDENS.write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
