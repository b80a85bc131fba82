"""Probabilities of tokens on the page, with alternatives to go on from."""

from __future__ import annotations

from keys import Keys
from llamacli.serve.requests import Admitted, Done, Finished, PromptLogprobs, TextDelta, Timings, TokenLogprob, Usage
from scripts import reply

TOP = ((1, b" fox", -0.3), (2, b" owl", -1.6), (3, b"\xf0", -4.0))
TOKENS = (TokenLogprob(5, b"A", -0.01, ((5, b"A", -0.01),)), TokenLogprob(1, b" fox", -0.3, TOP))


def test_alternatives_are_recorded_and_gone_on_from(site) -> None:
    page = site.page
    page.press("Settings")
    page.run("document.querySelector('#set-probabilities').click()")
    site.engine.script = reply("", tokens=TOKENS)
    page.send("an animal")
    assert page.wait_reply() == "A fox"
    page.press("Probabilities of the tokens")
    page.wait(lambda: len(page.all(".tokens span")) == 2)
    page.keys(Keys.ARROW_RIGHT, Keys.ENTER)
    page.wait_text(".token-head", "“␣fox” 74 %")
    rows = [one.text.split("\n") for one in page.all(".alternative")]
    assert rows == [["␣fox", "74 %", "chosen"], ["␣owl", "20 %", "go on"], ["\\xf0", "1.8 %"]]
    assert not page.button("Go on from here with \\xf0, 1.8 %").is_enabled()  # a part of a character
    site.engine.script = reply(" flies")
    page.keys(Keys.ENTER)
    page.wait(lambda: page.replies == ["A owl flies"])
    assert page.wait_reply() == "A owl flies"
    request = site.engine.requests[-1]
    assert site.engine._model.decode(request.prompts[0]).endswith("<assistant>A owl")
    assert page.text(".message.assistant .branches") == "2/2"
    page.press("Previous branch")
    page.wait(lambda: page.replies == ["A fox"])


def test_scores_of_a_reply_that_has_none(site) -> None:
    page = site.page
    site.engine.script = reply("A fox")
    page.send("an animal")
    page.wait_reply()
    begin = TokenLogprob(0, b"<assistant>", None)
    site.engine.script = lambda _: [
        Admitted(0.0), PromptLogprobs(0, (begin, *TOKENS)), TextDelta(0, "!", tokens=(TokenLogprob(9, b"!", -1.0),)),
        Finished(0, "length"), Done(Usage(3, 0, 1), Timings(0.0, 0.1, 0.1)),
    ]  # fmt: skip
    page.press("Probabilities of the tokens")
    page.wait(lambda: [one.text for one in page.all(".tokens span")] == ["A", " fox"])
    page.press("Hide the probabilities")
    page.wait(lambda: page.replies == ["A fox"])


def test_story_goes_on_from_another_word(story) -> None:
    """Stories of a model without a chat template are continued as texts."""
    page, _ = story
    page.run("localStorage.setItem('llamacli-settings', JSON.stringify({params: {max_tokens: 24, seed: 3}}))")
    page.open()
    page.send("Once upon a time there was")
    first = page.wait_reply()
    page.wait(lambda: page.one("#no-template").is_displayed())
    page.press("Probabilities of the tokens")
    page.wait(lambda: len(page.all(".tokens span")) == 24)
    tokens = [one.get_attribute("textContent") for one in page.all(".tokens span")]
    assert "".join(tokens).strip().startswith(first.split("\n")[0].strip())
    page.all(".tokens span")[4].click()
    other = page.one("button.alternative:not(:disabled)")
    word = other.text.split("\n")[0].replace("␣", " ")
    page.run("arguments[0].click()", other)
    page.wait(lambda: page.text(".message.assistant .branches") == "2/2")
    story = page.wait_reply()
    begun = "".join(tokens[:4]) + word
    assert story.startswith(begun.strip())
    assert len(story) > len(begun)
    assert page.errors() == []
