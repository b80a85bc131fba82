"""Tokens as HTML in notebooks."""

from llamacli import SamplingParams, load_model
from llamacli.chat.messages import Message, ToolCall
from llamacli.generation.heat import coloured
from llamacli.generation.text import Token
from llamacli.hub.demo import demo_path
from llamacli.sampling import LogProbs


def test_chats_show_the_conversation_and_probable_tokens() -> None:
    with load_model(demo_path()) as model, model.create_chat(max_tokens=4) as chat:
        assert chat._repr_html_().startswith("&lt;ChatSession of")
        chat.add_user("A <b> & a story?")
        list(chat.respond(SamplingParams(temperature=0)))
        first = chat.history[-1].content
        assert (
            f'A &lt;b&gt; &amp; a story?</p><p style="white-space: pre-wrap"><b>assistant</b> {first}'
            in chat._repr_html_()
        )
        chat.add_user("And then?")
        list(chat.respond(SamplingParams(temperature=0, n_probs=2)))
        assert chat._repr_html_().count("<span ") == len(chat.reply_tokens)
        chat.history.insert(0, Message("assistant", "", tool_calls=(ToolCall("find", {"a": "<"}),)))
        assert "find({&quot;a&quot;: &quot;&lt;&quot;})" in chat._repr_html_()


def test_tokens_have_the_others_in_their_place() -> None:
    with load_model(demo_path()) as model:
        (fox, owl) = (model.encode(word, add_special=False)[0] for word in (" fox", " owl"))
        html = coloured(model.tokenizer, [Token(owl, " owl", LogProbs(-0.5, ((fox, -0.1),))), Token(fox, " <")])
    assert 'title=" 90.5%  &#x27; fox&#x27;\n 60.7%  &#x27; owl&#x27;"> owl</span> &lt;' in html
