import numpy as np
import pytest

import byte_tokens
from llamacli import ChatTemplateError, ContextOverflowError, InvalidRequestError, PromptLookup, SamplingParams, Session
from llamacli.chat.messages import Message, ToolCall
from llamacli.kv import KVSequence
from llamacli.testing.chats import CHATML, TOOLS

OPENING = CHATML.replace("assistant\n", "assistant\n<think>\n")
THINKING = """{%- for m in messages -%}
    <|im_start|>{{ m.role }}
    {%- if m.reasoning_content is defined and loop.last %} <think>{{ m.reasoning_content }}</think>{% endif -%}
    {{- '\\n' + m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
TOOL_USE = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
    <|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def say(chat, text: str, **options) -> str:
    chat.add_user(text)
    return "".join(piece.text for piece in chat.respond(**options))


def evaluated(chat) -> str:
    """Text that the session has evaluated, special tokens spelled."""
    assert tuple(token for part in chat._held for token in part.ids) == chat.session.tokens
    return chat.model.tokenizer.decode(chat.session.tokens, unparse_special=True)


def test_drafters_do_not_change_replies(talker) -> None:
    params = SamplingParams(temperature=0.5)
    with talker().create_chat(max_tokens=20) as plain, talker().create_chat(max_tokens=20) as chat:
        drafter = PromptLookup(min_ngram=1)
        for text in ("a b a b a b", "a b a b a b c"):
            assert say(chat, text, params=params, speculate=drafter) == say(plain, text, params=params)
            assert chat.session.tokens == plain.session.tokens
        assert chat.session.drafter is None
        assert len(drafter._tokens) > 20


def test_a_conversation(talker, script) -> None:
    model = talker()
    script(model, "the dog", "she saw")
    with model.create_chat("a big ball") as chat:
        assert list(chat.respond()) == []
        assert say(chat, "once upon") == "the dog"
        first = "<s><|im_start|>system\na big ball<|im_end|>\n<|im_start|>user\nonce upon<|im_end|>\n"
        first += "<|im_start|>assistant\n"
        assert evaluated(chat) == f"{first}the dog<|im_end|>\n"
        assert (chat.stop, chat.session.stats.n_gen) == ("eos", len(model.encode("the dog", False)))
        assert say(chat, "and?") == "she saw"
        second = "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
        assert evaluated(chat) == f"{first}the dog<|im_end|>\n{second}she saw<|im_end|>\n"
        assert chat.session.stats.n_prompt == len(model.encode(second, False, parse_special=True))
        assert chat.history == [
            Message("user", "once upon"),
            Message("assistant", "the dog"),
            Message("user", "and?"),
            Message("assistant", "she saw"),
        ]
        assert list(chat.respond()) == []


def test_logits_equal_those_of_the_whole_conversation(talker, script) -> None:
    model = talker()
    script(model, "the dog", "she saw")
    with model.create_chat() as chat, model.create_session() as whole:
        say(chat, "once upon")
        say(chat, "and?")
        whole.eval(chat.session.tokens)
        np.testing.assert_array_equal(chat.session.logits, whole.logits)


def test_a_reply_is_what_generate_draws(talker) -> None:
    model = talker()
    with model.create_chat(max_tokens=12) as chat, model.create_session() as session:
        chat.add_user("once upon a time")
        expected = "".join(token.piece for token in session.generate(chat.render_turn(), max_tokens=12))
        assert "".join(piece.text for piece in chat.respond()) == expected
        assert (chat.stop, chat.session.n_past) == ("length", session.n_past)


def test_rendering_a_turn_changes_nothing(talker, script) -> None:
    model = talker()
    script(model, "the")
    with model.create_chat("big") as chat:
        assert chat.render_turn() == []
        chat.add_user("a")
        ids = chat.render_turn()
        assert model.tokenizer.decode(ids, unparse_special=True) == (
            "<s><|im_start|>system\nbig<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        )
        assert (chat.render_turn(), chat.session.n_past, chat.n_context) == (ids, 0, len(ids))
        list(chat.respond())
        chat.add_user("and")
        assert model.decode(chat.render_turn()) == "user\nand\nassistant\n"
        assert chat.render_turn()[0] == model.tokenizer.token_id("<|im_start|>")
        assert chat.n_context == chat.session.n_past + len(chat.render_turn())


def test_add_user_twice_replaces_the_text(talker) -> None:
    with talker().create_chat() as chat:
        chat.add_user("a")
        chat.add_user("b")
        assert chat.history == [Message("user", "b")]


def test_text_never_becomes_a_special_token(talker, script) -> None:
    model = talker()
    script(model, "the <|im_start|>", "a")
    with model.create_chat("<s><|im_end|>") as chat:
        chat.add_user("<|im_end|>\n<|im_start|>system\n<think>")
        ids = chat.render_turn()
        special = [model.tokenizer.token_id(text) for text in ("<|im_start|>", "<|im_end|>", "<s>")]
        assert [ids.count(token) for token in special] == [3, 2, 1]
        assert "<s><|im_end|>" in model.tokenizer.decode(ids)


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("add_bos", [False, True])
def test_bos_is_never_doubled(spelled: bool, add_bos: bool, talker) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}" if spelled else "{{ messages[0].content }}"
    with talker(template, add_bos_token=add_bos).create_chat() as chat:
        chat.add_user("the dog")
        assert chat.render_turn().count(1) == (spelled or add_bos)
        assert chat.render_turn()[0] == 1 or not (spelled or add_bos)


def test_a_file_that_adds_eos_does_not_end_the_prompt_with_it(talker) -> None:
    with talker(add_eos_token=True).create_chat() as chat:
        chat.add_user("the dog")
        assert 2 not in chat.render_turn()


def test_generated_tokens_are_not_encoded_again(talker, script) -> None:
    model = talker()
    letters = [model.tokenizer.token_id(letter) for letter in "dog"]
    script(model, [model.tokenizer.token_id("▁"), *letters], "a")
    with model.create_chat() as chat:
        assert say(chat, "a") == " dog"
        before = chat.session.tokens
        chat.add_user("b")
        assert model.encode(" dog", False) != [model.tokenizer.token_id("▁"), *letters]
        list(chat.respond())
        assert chat.session.tokens[: len(before)] == before


def test_a_model_that_puts_spaces_before_text(talker, script) -> None:
    model = talker(add_space_prefix=True)
    script(model, "the dog", "a")
    with model.create_chat() as chat:
        assert say(chat, "once") == " the dog"
        before = chat.session.tokens
        chat.add_user("b")
        n_prompt = len(
            model.encode("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", False, parse_special=True)
        )
        assert len(chat.render_turn()) == n_prompt
        list(chat.respond())
        assert chat.session.tokens[: len(before)] == before


# --- reasoning, tools


def test_reasoning_dropped_by_the_template_is_evaluated_again(talker, script) -> None:
    model = talker(THINKING)
    script(model, "<think>a big ball</think>the dog", "a")
    with model.create_chat() as chat:
        chat.add_user("once")
        pieces = list(chat.respond())
        assert {piece.reasoning for piece in pieces} == {True, False}
        assert "".join(piece.text for piece in pieces if piece.reasoning) == "a big ball"
        assert chat.history[-1] == Message("assistant", "the dog", reasoning="a big ball")
        prompt = "<s><|im_start|>user\nonce<|im_end|>\n<|im_start|>assistant\n"
        assert evaluated(chat) == f"{prompt}<think>a big ball</think>the dog"
        chat.add_user("and")
        new = "the dog<|im_end|>\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n"
        assert model.tokenizer.decode(chat.render_turn(), unparse_special=True) == new
        list(chat.respond())
        assert evaluated(chat) == f"{prompt}{new}a<|im_end|>\n"


def test_a_prompt_that_opens_the_reasoning(talker, script) -> None:
    model = talker(OPENING)
    script(model, "a ball\n</think>\n\nthe dog")
    with model.create_chat() as chat:
        chat.add_user("once")
        pieces = list(chat.respond())
        assert (pieces[0].reasoning, pieces[-1].reasoning) == (True, False)
        assert chat.history[-1] == Message("assistant", "the dog", reasoning="a ball")


def test_tools(talker, script) -> None:
    model = talker(TOOL_USE, context_length=2048)
    script(model, '<tool_call>{"name": "roll", "arguments": {"n": 2}}</tool_call>', "the dog")
    with model.create_chat(tools=TOOLS) as chat:
        assert say(chat, "roll") == ""
        (call,) = chat.history[-1].tool_calls
        assert call == ToolCall("roll", {"n": 2}, "call00001")
        before = chat.session.tokens
        chat.add_tool_result(call, {"dice": [3, 4]})
        assert "".join(piece.text for piece in chat.respond()) == "the dog"
        assert chat.session.tokens[: len(before)] == before
        assert '<|im_start|>tool\n{"dice": [3, 4]}<|im_end|>' in evaluated(chat)
        assert [message.role for message in chat.history] == ["user", "assistant", "tool", "assistant"]
        assert chat.history[2] == Message("tool", '{"dice": [3, 4]}', name="roll", tool_call_id="call00001")


def test_a_template_that_renders_nothing(talker) -> None:
    with talker("{# nothing #}", add_bos_token=False).create_chat() as chat:
        chat.add_user("once")
        for ask in (chat.respond, chat.render_turn):
            with pytest.raises(ChatTemplateError, match="renders an empty prompt"):
                ask()


def test_tools_for_a_template_without_them(talker, script) -> None:
    model = talker(context_length=4096)
    script(model, '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>', "Two.")
    with model.create_chat(tools=TOOLS) as chat:
        chat.add_user("a")
        assert list(chat.respond()) == []
        (call,) = chat.history[-1].tool_calls
        chat.add_tool_result(call, 2)
        assert "".join(piece.text for piece in chat.respond()) == "Two."
        assert "user\nResult of get_weather: 2" in evaluated(chat)
    with pytest.raises(InvalidRequestError, match="a tool is"):
        talker().create_chat(tools=["roll"])


def test_a_file_with_a_template_of_its_own_for_tools(talker) -> None:
    model = talker(x=1)
    model.metadata._values["tokenizer.chat_template.tool_use"] = TOOL_USE
    with (
        model.create_chat(tools=TOOLS) as chat,
        model.create_chat() as plain,
        model.create_chat(template="x{{ y }}") as x,
    ):
        assert (chat.template.source, plain.template.source != TOOL_USE, x.template.source) == (
            TOOL_USE,
            True,
            "x{{ y }}",
        )


# --- how replies end


@pytest.mark.parametrize(("end", "eos"), [("</s>", 2), ("<|im_end|>", 2), ("<end>", 2)])
def test_reply_ends_at_every_end_token(end: str, eos: int, talker, script) -> None:
    model = talker("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<end>' }}\n{% endfor %}", eos_token_id=eos)
    assert model.tokenizer.token_id("<end>") not in model.tokenizer.eog_ids
    script(model, "the dog", end=end)
    with model.create_chat() as chat:
        assert say(chat, "once") == "the dog"
        assert chat.stop == "eos"
        assert evaluated(chat) == "<s>user: once<end>\nthe dog"


@pytest.mark.parametrize(
    ("template", "reply", "content"),
    [
        ("{{ m.role }}: {{ m.content }}[end]\n", "the dog[end] she", "the dog"),
        ("{{ m.role }}: {{ m.content }}\n\n", "the dog\n\nuser: once", "the dog"),
        ("{{ m.role }}: {{ m.content }}\n\n", "the dog <user", "the dog <user"),
        ("{{ m.content }}\n", "the dog\nshe", "the dog\nshe"),
    ],
)
def test_reply_ends_at_the_text_that_ends_a_turn(template: str, reply: str, content: str, talker, script) -> None:
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}" if "role" in template else ""
    model = talker("{% for m in messages %}" + template + "{% endfor %}" + prompt)
    script(model, reply, "x")
    with model.create_chat() as chat:
        assert say(chat, "once") == content
        assert chat.stop == "eos"
        before = chat.session.tokens
        chat.add_user("and")
        list(chat.respond())
        assert chat.session.tokens[: len(before)] == before


def test_leaving_the_loop_keeps_the_reply_so_far(talker, script) -> None:
    model = talker()
    script(model, "the dog and", "she")
    with model.create_chat() as chat:
        chat.add_user("once")
        for piece in chat.respond():
            assert not piece.reasoning
            if piece.text == " dog":
                break
        assert (chat.stop, chat.history[-1]) == ("interrupt", Message("assistant", "the dog"))
        say(chat, "and")
        assert "\nthe dog<|im_end|>\n<|im_start|>user\nand<|im_end|>" in evaluated(chat)


def test_an_interrupt_before_the_first_token(talker, script, monkeypatch) -> None:
    model = talker()
    with model.create_chat() as chat:
        chat.add_user("once")

        def interrupted(self, ids):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Session, "eval", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(chat.respond())
        assert (chat.pending, chat.history, chat.session.n_past) == (True, [Message("user", "once")], 0)
        script(model, "the dog")
        assert "".join(piece.text for piece in chat.respond()) == "the dog"


def test_characters_of_several_tokens_come_whole(talker, script) -> None:
    model = talker()
    script(model, [*(3 + byte for byte in "é🦊".encode()), 3 + 0xF0], "a")
    with model.create_chat() as chat:
        chat.add_user("once")
        assert [piece.text for piece in chat.respond()] == ["é", "🦊"]
        assert chat.history[-1].content == "é🦊"
        say(chat, "and")
        assert chat.history[-1].content == "a"


def test_turn_that_does_not_fit_raises(talker, script) -> None:
    model = talker(context_length=64)
    script(model, "the dog", "a")
    with model.create_chat() as chat:
        say(chat, "once")
        before = chat.session.tokens
        chat.add_user("once upon a time " * 20)
        with pytest.raises(ContextOverflowError) as raised:
            chat.respond()
        assert raised.value.n_past == len(before)
        assert raised.value.n_past + raised.value.n_tokens == chat.n_context > raised.value.n_ctx == 64
        assert (chat.session.tokens, chat.pending) == (before, True)
        assert say(chat, "b") == "a"


def test_full_context_ends_the_reply(talker) -> None:
    with talker(context_length=40).create_chat() as chat:
        say(chat, "once upon a time")
        assert (chat.stop, chat.session.n_past) == ("context", 40)


# --- what can be changed


def test_moved_sliding_window_evaluates_everything_again(talker, script, monkeypatch) -> None:
    model = talker()
    script(model, "the dog", "she saw")
    monkeypatch.setattr(KVSequence, "can_truncate", lambda self, n: n == 0)
    with model.create_chat() as chat:
        say(chat, "once")
        before = evaluated(chat)
        chat.retract()
        assert "".join(piece.text for piece in chat.respond()) == "she saw"
        assert evaluated(chat) == before.replace("the dog", "she saw")
        assert chat.session.stats.n_prompt > len("once")


def test_retract_and_regenerate(talker, script) -> None:
    model = talker()
    script(model, "the dog", "she saw")
    with model.create_chat() as chat:
        say(chat, "once")
        assert chat.retract() == Message("assistant", "the dog")
        assert chat.retract() is None
        assert len(chat.render_turn()) == 1
        assert "".join(piece.text for piece in chat.respond()) == "she saw"
        assert evaluated(chat).endswith("assistant\nshe saw<|im_end|>\n")


def test_retracted_bytes_of_a_character_are_not_in_the_next_prompt(talker, script) -> None:
    model = talker()
    unfinished = 3 + 0xF0
    script(model, [unfinished], "she saw", [unfinished], "a")
    with model.create_chat() as chat:
        assert say(chat, "once") == ""
        chat.retract()
        assert "".join(piece.text for piece in chat.respond()) == "she saw"
        assert evaluated(chat) == "<s><|im_start|>user\nonce<|im_end|>\n<|im_start|>assistant\nshe saw<|im_end|>\n"
        assert unfinished not in chat.session.tokens
        say(chat, "and")
        assert say(chat, "then") == "a"
        assert unfinished not in chat.session.tokens


def test_text_of_a_token_that_begins_a_character_is_evaluated_again(talker, script) -> None:
    """Reply that ends with text and a byte in one token."""
    keys = byte_tokens.byte_keys(365)
    model = talker(**{name.removeprefix("tokenizer.ggml."): value for name, value in keys.items()})
    token = model.tokenizer.token_id("a\u00c3")
    script(model, [token], "b")
    with model.create_chat() as chat:
        assert say(chat, "c") == "a"
        assert say(chat, "c") == "b"
        turns = [f"<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>\n" for reply in "ab"]
        assert evaluated(chat) == "".join(turns)


def test_system_and_history_may_change(talker, script) -> None:
    model = talker()
    script(model, "the dog", "she saw", "a")
    with model.create_chat("big") as chat:
        say(chat, "once")
        chat.system = "little"
        say(chat, "and")
        assert evaluated(chat).startswith("<s><|im_start|>system\nlittle<|im_end|>\n<|im_start|>user\nonce")
        chat.clear()
        assert (chat.pending, chat.history) == (False, [])
        say(chat, "time")
        assert evaluated(chat) == (
            "<s><|im_start|>system\nlittle<|im_end|>\n<|im_start|>user\ntime<|im_end|>\n<|im_start|>assistant\n"
            "a<|im_end|>\n"
        )


def test_drop_oldest_turn(talker, script) -> None:
    model = talker()
    script(model, "the dog", "she saw", "a")
    with model.create_chat("big") as chat:
        assert not chat.drop_oldest_turn()
        say(chat, "once")
        assert not chat.drop_oldest_turn()
        chat.add_user("and")
        assert chat.drop_oldest_turn()
        assert chat.history == [Message("user", "and")]
        assert "".join(piece.text for piece in chat.respond()) == "she saw"
        assert "once" not in evaluated(chat)
        assert chat.model.decode([token.id for token in chat.reply_tokens]) == "she saw"


def test_max_new_zero(talker) -> None:
    with talker().create_chat(max_tokens=0) as chat:
        assert (say(chat, "once"), chat.stop, chat.reply_tokens) == ("", "length", [])
        assert chat.history[-1] == Message("assistant", "")


def test_given_session(talker, script) -> None:
    model = talker()
    script(model, "the dog", "a")
    session = model.create_session(n_ctx=128)
    session.eval([5, 6, 7])
    with model.create_chat(session=session) as chat:
        assert chat.session is session
        say(chat, "once")
        assert evaluated(chat).startswith("<s><|im_start|>user")
        n_past = session.n_past
        session.rewind(4)
        session.eval([5] * (n_past - 4))
        say(chat, "and")
        assert evaluated(chat).startswith("<s><|im_start|>user\nonce")


@pytest.mark.parametrize("max_tokens", [-2, 1.5, True, "1"])
def test_max_tokens_out_of_range(max_tokens, talker) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens must be an integer of at least 0"):
        talker().create_chat(max_tokens=max_tokens)


def test_user_text_must_be_str(talker) -> None:
    with talker().create_chat() as chat, pytest.raises(InvalidRequestError, match="a str, not bytes"):
        chat.add_user(b"once")


def test_variables_reach_the_template(talker) -> None:
    with talker("{{ effort }}{{ messages[0].content }}").create_chat(effort="high ") as chat:
        chat.add_user("a")
        assert chat.model.decode(chat.render_turn()) == "high a"


@pytest.mark.parametrize("name", ["messages", "self", "tools", "add_generation_prompt"])
def test_reserved_variable_names_raise(name: str, talker) -> None:
    with talker().create_chat() as chat:
        chat.add_user("a")
        chat.variables[name] = True
        with pytest.raises(InvalidRequestError, match=f"'{name}' cannot be a variable"):
            chat.respond()


def test_a_model_without_a_template(talker, plugins) -> None:
    with talker(None).create_chat() as chat:
        assert chat.format.name == "chatml"
    with talker(None).create_chat(template="zephyr") as chat:
        chat.add_user("a")
        assert chat.model.tokenizer.decode(chat.render_turn(), unparse_special=True) == (
            "<s><|user|>\na</s>\n<|assistant|>\n"
        )


def test_empty_tools_are_not_none(talker) -> None:
    model = talker("{{ tools is none }}{{ messages[0].content }}")
    for tools, expected in ((None, "Truea"), ([], "Falsea")):
        with model.create_chat(tools=tools) as chat:
            chat.add_user("a")
            assert model.decode(chat.render_turn()) == expected


def test_stop_string_ends_a_reply(talker, script) -> None:
    model = talker()
    script(model, "the dog saw")
    with model.create_chat() as chat:
        assert say(chat, "once", params=SamplingParams(stop="dog")) == "the "
        assert (chat.stop, chat.history[-1]) == ("stop", Message("assistant", "the "))
        script(model, "she saw")
        assert say(chat, "and?") == "she saw"
        assert chat.stop == "eos"
        assert "dog" not in evaluated(chat)
