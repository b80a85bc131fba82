import pytest

from llamacli.chat.formats import choose
from llamacli.chat.template import ChatTemplate
from llamacli.gguf import Metadata
from llamacli.testing.vocabularies import CONTROL, NORMAL, tokenizer_keys
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli_rwkv.chat import FORMATS

TEXTS = ["<s>", *(repr(bytes([byte]))[2:-1] for byte in range(256)), r"\n\n"]
MESSAGES = [
    {"role": role, "content": text}
    for role, text in (("system", "Be brief."), ("user", " Hi "), ("assistant", "Hello."), ("user", "Why?"))
]


def metadata(template: str | None) -> Metadata:
    types = [CONTROL] + [NORMAL] * (len(TEXTS) - 1)
    keys = tokenizer_keys({"model": "rwkv", "tokens": TEXTS, "token_type": types, "eot_token_id": len(TEXTS) - 1})
    return Metadata(keys | ({"tokenizer.chat_template": template} if template else {}))


@pytest.mark.parametrize("template", [None, "rwkv-world"])
def test_turns(template: str | None) -> None:
    """Older files have the format's name in the place of a template."""
    found = metadata(template)
    tokenizer = tokenizer_from_metadata(found)
    fmt = choose(found, tokenizer, FORMATS)
    assert fmt.name == "rwkv-world"
    assert fmt.template is not None
    assert ChatTemplate(fmt.template, tokenizer).render(MESSAGES, add_generation_prompt=True).text == (
        "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Why?\n\nAssistant:"
    )
    assert tokenizer.encode("\n\n")[0] in tokenizer.eog_ids
