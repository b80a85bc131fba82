"""Chat templates that llama.cpp has under a name, as tables of turns."""

from __future__ import annotations

import json

import attrs


@attrs.frozen(kw_only=True)
class Turns:
    """Texts around the messages of a chat, by role.

    %c is the content, %t the content without spaces around it, %r the role, %R the role in capitals.

    - `system`, `user`, `assistant`, `tool`: messages; None is refused. `other`: messages of roles without a text.
    - `start`: before all messages; `unless_system`: then, if the first message is not the system's.
    - `opens`: before the first message, and `reopens` before those that follow one of the assistant. `between`: before
      all but the first.
    - `generation`: beginning of a reply.
    """

    system: str | None = None
    user: str | None = None
    assistant: str | None = None
    tool: str | None = None
    other: str | None = None
    start: str = ""
    unless_system: str = ""
    opens: str = ""
    reopens: str | None = None
    between: str = ""
    generation: str = ""

    def template(self) -> str:
        """Jinja source."""
        again = self.opens if self.reopens is None else self.reopens
        parts = [_text(self.start)]
        if self.unless_system:
            parts.append(f"{{%- if messages[0].role != 'system' -%}}{_text(self.unless_system)}{{%- endif -%}}")
        parts.append("{%- for message in messages -%}")
        if self.opens:
            parts.append(f"{{%- if loop.first -%}}{_text(self.opens)}")
            parts.append(f"{{%- elif loop.previtem.role == 'assistant' -%}}{_text(again)}{{%- endif -%}}")
        if self.between:
            parts.append(f"{{%- if not loop.first -%}}{_text(self.between)}{{%- endif -%}}")
        word = "if"
        for role in ("system", "user", "assistant", "tool"):
            if (text := getattr(self, role)) is not None:
                parts.append(f"{{%- {word} message.role == '{role}' -%}}{_text(text)}")
                word = "elif"
        if self.other is None:
            refusal = "{{- raise_exception('this template has no messages of the role ' + message.role) -}}"
            parts.append(f"{{%- else -%}}{refusal}{{%- endif -%}}")
        else:
            parts.append(_text(self.other) if word == "if" else f"{{%- else -%}}{_text(self.other)}{{%- endif -%}}")
        parts.append("{%- endfor -%}")
        parts.append(f"{{%- if add_generation_prompt -%}}{_text(self.generation)}{{%- endif -%}}")
        return "".join(parts)


_PLACES = {"%c": "message.content", "%t": "message.content.strip()", "%r": "message.role", "%R": "message.role.upper()"}


def _text(text: str) -> str:
    """Jinja output of a text with places."""
    parts, at = [], 0
    while (found := text.find("%", at)) >= 0:
        parts += [json.dumps(text[at:found], ensure_ascii=False), _PLACES[text[found : found + 2]]]
        at = found + 2
    parts.append(json.dumps(text[at:], ensure_ascii=False))
    shown = " + ".join(part for part in parts if part != '""')
    return f"{{{{- {shown} -}}}}" if shown else ""


def _by_role(text: str, generation: str, **more: str) -> Turns:
    return Turns(other=text, generation=generation, **more)


def _llama_2(system: str, again: str = "[INST] ", place: str = "%c") -> Turns:
    return Turns(
        system=system, user=f"{place} [/INST]", assistant=f"{place}</s>", opens="[INST] ", reopens=again
    )  # fmt: skip


def _mistral(before: str, after: str, reply: str = "%c") -> Turns:
    return Turns(
        system="%c\n\n", user=f"%c{before}[/INST]", assistant=f"{after}{reply}</s>", opens=f"{before}[INST]{after}"
    )  # fmt: skip


_GRANITE = _by_role(
    "<|start_of_role|>%r<|end_of_role|>%c<|end_of_text|>\n", "<|start_of_role|>assistant<|end_of_role|>"
)
_SYS = "<<SYS>>\n%c\n<</SYS>>\n\n"
_END = "<｜end▁of▁sentence｜>"
_BAILING = {"user": "<role>HUMAN</role>%c", "other": "<role>%R</role>%c"}

NAMED = {
    "llama2": _llama_2("%c\n"),
    "llama2-sys": _llama_2(_SYS),
    "llama2-sys-bos": _llama_2(_SYS, "<s>[INST] "),
    "llama2-sys-strip": _llama_2(_SYS.replace("%c", "%t"), place="%t"),
    "mistral-v1": _mistral(" ", " "),
    "mistral-v3": _mistral("", " ", "%t"),
    "mistral-v3-tekken": _mistral("", ""),
    "mistral-v7": Turns(
        system="[SYSTEM_PROMPT] %c[/SYSTEM_PROMPT]", user="[INST] %c[/INST]", assistant=" %c</s>"
    ),
    "mistral-v7-tekken": Turns(
        system="[SYSTEM_PROMPT]%c[/SYSTEM_PROMPT]", user="[INST]%c[/INST]", assistant="%c</s>"
    ),
    "phi3": _by_role("<|%r|>\n%c<|end|>\n", "<|assistant|>\n"),
    "phi4": _by_role("<|im_start|>%r<|im_sep|>%c<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    "falcon3": _by_role("<|%r|>\n%c\n", "<|assistant|>\n"),
    "monarch": _by_role("%r\n%c</s>\n", "<s>assistant\n", between="<s>"),
    "orion": Turns(user="Human: %c\n\nAssistant: </s>", assistant="%c</s>"),
    "openchat": Turns(
        system="%c<|end_of_turn|>", user="GPT4 Correct User: %c<|end_of_turn|>",
        assistant="GPT4 Correct Assistant: %c<|end_of_turn|>", generation="GPT4 Correct Assistant:",
    ),
    "vicuna": Turns(
        system="%c\n\n", user="USER: %c\n", assistant="ASSISTANT: %c</s>\n", generation="ASSISTANT:"
    ),
    "vicuna-orca": Turns(
        system="SYSTEM: %c\n", user="USER: %c\n", assistant="ASSISTANT: %c</s>\n", generation="ASSISTANT:"
    ),
    "deepseek": Turns(
        system="%c", user="### Instruction:\n%c\n", assistant="### Response:\n%c\n<|EOT|>\n",
        generation="### Response:\n",
    ),
    "deepseek2": Turns(
        system="%c\n\n", user="User: %c\n\n", assistant=f"Assistant: %c{_END}", generation="Assistant:"
    ),
    "deepseek3": Turns(
        system="%c\n\n", user="<｜User｜>%c", assistant=f"<｜Assistant｜>%c{_END}", generation="<｜Assistant｜>"
    ),
    "deepseek-ocr": _by_role("%c", ""),
    "command-r": Turns(
        system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>%t<|END_OF_TURN_TOKEN|>",
        user="<|START_OF_TURN_TOKEN|><|USER_TOKEN|>%t<|END_OF_TURN_TOKEN|>",
        assistant="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>%t<|END_OF_TURN_TOKEN|>",
        generation="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "llama3": _by_role(
        "<|start_header_id|>%r<|end_header_id|>\n\n%t<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "chatglm3": _by_role("<|%r|>\n %c", "<|assistant|>", start="[gMASK]sop"),
    "chatglm4": _by_role("<|%r|>\n%c", "<|assistant|>\n", start="[gMASK]<sop>"),
    "glmedge": _by_role("<|%r|>\n%c", "<|assistant|>"),
    "minicpm": Turns(user="<用户>%t<AI>", other="%t"),
    "exaone3": Turns(
        system="[|system|]%t[|endofturn|]\n", user="[|user|]%t\n", assistant="[|assistant|]%t[|endofturn|]\n",
        generation="[|assistant|]",
    ),
    "exaone4": Turns(user="[|user|]%t\n", other="[|%r|]%t[|endofturn|]\n", generation="[|assistant|]"),
    "exaone-moe": _by_role("<|%r|>\n%t<|endofturn|>\n", "<|assistant|>\n"),
    "rwkv-world": Turns(
        system="System: %t\n\n", user="User: %t\n\n", assistant="Assistant: %t\n\n", generation="Assistant:"
    ),
    "granite": _GRANITE,
    "granite-4.0": _GRANITE,
    "granite-4.1": _GRANITE,
    "gigachat": Turns(
        start="<s>", system="%c<|message_sep|>",
        user="user<|role_sep|>%c<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
        assistant="assistant<|role_sep|>%c<|message_sep|>", generation="assistant<|role_sep|>",
    ),
    "megrez": _by_role("<|role_start|>%r<|role_end|>%c<|turn_end|>", "<|role_start|>assistant<|role_end|>"),
    "yandex": Turns(
        user=" Пользователь: %c\n\n", assistant=" Ассистент: %c\n\n", generation=" Ассистент:[SEP]"
    ),
    "bailing": Turns(**_BAILING, generation="<role>ASSISTANT</role>"),
    "bailing-think": Turns(**_BAILING, generation="<role>ASSISTANT</role><think>"),
    "bailing2": Turns(
        unless_system="<role>SYSTEM</role>detailed thinking off<|role_end|>",
        user="<role>HUMAN</role>%c<|role_end|>", other="<role>%R</role>%c<|role_end|>",
        generation="<role>ASSISTANT</role>",
    ),
    "llama4": _by_role(
        "<|header_start|>%r<|header_end|>\n\n%t<|eot|>", "<|header_start|>assistant<|header_end|>\n\n"
    ),
    "smolvlm": Turns(
        start="<|im_start|>", system="%c\n\n", user="User: %c<end_of_utterance>\n",
        assistant="Assistant: %c<end_of_utterance>\n", generation="Assistant:",
    ),
    "hunyuan-moe": Turns(
        system="<|startoftext|>%c<|extra_4|>", assistant="%c<|eos|>", other="<|startoftext|>%c<|extra_0|>"
    ),
    "gpt-oss": Turns(
        assistant="<|start|>assistant<|message|>%c<|return|>", other="<|start|>%r<|message|>%c<|end|>",
        generation="<|start|>assistant",
    ),
    "hunyuan-dense": Turns(
        system="%c<｜hy_place▁holder▁no▁3｜>", user="<｜hy_User｜>%c<｜hy_Assistant｜>",
        assistant="<｜hy_Assistant｜>%c<｜hy_place▁holder▁no▁2｜>",
    ),
    "hunyuan-vl": Turns(
        start="<｜hy_begin▁of▁sentence｜>", system="%c<｜hy_place▁holder▁no▁3｜>", user="%c<｜hy_User｜>",
        assistant="%c<｜hy_Assistant｜>",
    ),
    "kimi-k2": Turns(
        system="<|im_system|>system<|im_middle|>%c<|im_end|>", user="<|im_user|>user<|im_middle|>%c<|im_end|>",
        assistant="<|im_assistant|>assistant<|im_middle|>%c<|im_end|>",
        tool="<|im_system|>tool<|im_middle|>%c<|im_end|>", generation="<|im_assistant|>assistant<|im_middle|>",
    ),
    "seed_oss": Turns(
        assistant="<seed:bos>assistant\n%t<seed:eos>", other="<seed:bos>%r\n%c<seed:eos>",
        generation="<seed:bos>assistant\n",
    ),
    "grok-2": Turns(
        system="System: %t<|separator|>\n\n", user="Human: %t<|separator|>\n\n",
        assistant="Assistant: %c<|separator|>\n\n", generation="Assistant:",
    ),
    "pangu-embedded": Turns(
        unless_system="[unused9]系统：[unused10]", system="[unused9]系统：%c[unused10]",
        user="[unused9]用户：%c[unused10]", assistant="[unused9]助手：%c[unused10]", tool="[unused9]工具：%c[unused10]",
        generation="[unused9]助手：",
    ),
    "solar-open": _by_role("<|begin|>%r<|content|>%c<|end|>", "<|begin|>assistant"),
}  # fmt: skip
"""Templates by llama.cpp's names, but for those of formats."""
