import pytest

from llamacli.chat.formats import choose
from llamacli.chat.messages import ToolCall
from llamacli.chat.template import ChatTemplate
from llamacli.gguf import Metadata
from llamacli.testing.vocabularies import CONTROL, byte_level, scored
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli_llama.chat import FORMATS

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
TAGS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def found(tokens=(), *, name: str = "A model", pieces: bool = True, template: str | None = None, architecture="llama"):
    """The format of a file, and its template."""
    kinds = dict.fromkeys(tokens, CONTROL)
    values = scored({"▁": 0}, kinds) if pieces else byte_level([], kinds, bos_token_id=256)
    values |= {"general.architecture": architecture, "general.name": name}
    if template is not None:
        values["tokenizer.chat_template"] = template
    metadata = Metadata(values)
    tokenizer = tokenizer_from_metadata(metadata)
    fmt = choose(metadata, tokenizer, FORMATS)
    assert fmt.template is not None
    return fmt, ChatTemplate(fmt.template, tokenizer)


def test_headers() -> None:
    fmt, template = found(TAGS, pieces=False)
    assert fmt.name == "llama-3"
    assert template.render(TALK, add_generation_prompt=True).text == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("name", ["Llama 2 7B Chat", "LLaMA v2", "llama-2-13b", "Mistral-7B-Instruct-v0.1", "Mixtral"])
def test_instructions(name: str) -> None:
    fmt, template = found(name=name) if name != "LLaMA v2" else found(["[INST]"], name=name)
    assert fmt.name == "llama-2"
    assert template.render(TALK, add_generation_prompt=True).text == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Bye [/INST]"
    )
    assert template.render(TALK[1:2]).text == "<s>[INST] Hi [/INST]"


def test_zephyr() -> None:
    fmt, template = found()
    assert fmt.name == "zephyr"
    assert template.render(TALK[:2], add_generation_prompt=True).text == (
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n"
    )


def test_other_formats_are_not_detected() -> None:
    assert found(["<|im_start|>", "<|im_end|>"])[0].name == "chatml"
    assert found(template="{{ messages }}")[0].name == "derived"
    assert found(TAGS, template="<|start_header_id|><|eot_id|>", architecture="other")[0].name == "derived"


def test_calls_are_json_after_a_tag_or_alone() -> None:
    fmt, _ = found(TAGS, pieces=False, template='<|start_header_id|> <|eot_id|> "parameters": ')
    for text in ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', '{"name": "f", "parameters": {"x": 1}}'):
        reader = fmt.syntax.reader("", tools=True)
        assert (reader.feed(text) + reader.flush())[-1] == ToolCall("f", {"x": 1})


MISTRAL = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")


def test_system_prompts() -> None:
    fmt, template = found(MISTRAL, architecture="mistral3")
    assert fmt.name == "mistral-v7"
    assert template.render(TALK, add_generation_prompt=True).text == (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Hello.</s>[INST]Bye[/INST]"
    )
