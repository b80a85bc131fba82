"""Record llama.cpp's named chat templates: `python -m oracle.named_templates`."""

import ctypes
import json

from llamacli.chat.named import named_templates
from oracle.goldens import DIRECTORY

GOLDEN = DIRECTORY / "named_templates.json"
CONVERSATIONS = [
    [("user", "Hi  ")],
    [("system", " Be brief. "), ("user", " Hi"), ("assistant", " Hello\n"), ("user", "Why?\n")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", " d "), ("user", "e")],
]


def _prompt(name: str, conversation: list[tuple[str, str]]) -> str:
    import llama_cpp

    pairs = [llama_cpp.llama_chat_message(role.encode(), content.encode()) for role, content in conversation]
    buffer = ctypes.create_string_buffer(4096)
    messages = (llama_cpp.llama_chat_message * len(pairs))(*pairs)
    n = llama_cpp.llama_chat_apply_template(name.encode(), messages, len(pairs), True, buffer, len(buffer))
    return buffer.raw[:n].decode()


if __name__ == "__main__":
    prompts = {
        name: [_prompt(name, conversation) for conversation in CONVERSATIONS] for name in sorted(named_templates())
    }
    lines = (f"{json.dumps(name)}: {json.dumps(found, ensure_ascii=False)}" for name, found in prompts.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
