"""Page by keyboard, by screen reader, on a phone, in both colours."""

from __future__ import annotations

import re

import pytest

from keys import Keys
from llamacli.serve.errors import InternalError
from scripts import reply

TEXT = (
    '# Title\n\nSome **text** with `code` and a [link](https://e.org).\n\n```js\n// comment\nlet x = f("s", 1);\n```\n'
)

CONTRASTS = """
    const channel = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const over = (colour, below) => {
      canvas.fillStyle = `rgb(${below.join(',')})`; canvas.fillRect(0, 0, 1, 1);
      canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const ground = (node) => node
      ? over(getComputedStyle(node).backgroundColor, ground(node.parentElement))
      : [255, 255, 255];
    const light = (rgb) => rgb.map((c, i) => channel(c / 255) * [0.2126, 0.7152, 0.0722][i]).reduce((a, b) => a + b);
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
      if (node.closest('.visually-hidden, .skip, :disabled')) continue;
      const below = ground(node);
      const [a, b] = [light(below), light(over(getComputedStyle(node).color, below))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < 4.5) found.push(`${walker.currentNode.data.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
    }
    return found;
"""

UNNAMED = """
    const named = (one) => one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length;
    return [...document.querySelectorAll('button, input:not([type=file]), select, textarea')]
      .filter((one) => one.checkVisibility() && !named(one)).map((one) => one.outerHTML);
"""


def test_keyboard_alone(site) -> None:
    """A conversation without the mouse: send, stop, edit, settings, new conversation."""
    page, engine = site.page, site.engine
    assert page.run("return document.activeElement.id") == "message"
    engine.script, engine.limit = reply("one two three"), 2
    page.keys("hi", Keys.SHIFT, Keys.ENTER, Keys.NULL, "there", Keys.ENTER)
    page.wait_text(".message.assistant .body", "one")
    assert page.text(".message.user .body") == "hi\nthere"
    page.keys(Keys.ESCAPE)
    page.wait_text(".state", "Stopped.")
    engine.limit = None
    reached = set()
    for _ in range(40):  # backwards from the field through the buttons of the messages
        page.keys(Keys.SHIFT, Keys.TAB)
        label = page.run("return document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText")
        reached.add(label)
        if label == "Regenerate":
            assert page.run("return getComputedStyle(document.activeElement).outlineStyle") != "none"
            page.keys(Keys.ENTER)
            break
    page.wait(lambda: page.replies == ["one two three"])
    page.wait_reply()
    assert {"Delete from here on", "Probabilities of the tokens", "Edit"} <= reached
    page.keys(Keys.ALT, "s")
    page.wait(lambda: page.run("return document.activeElement.closest('#settings') !== null"))
    page.keys(Keys.ALT, "s")
    page.wait(lambda: page.run("return document.activeElement.id") == "show-settings")
    page.keys("/")
    page.wait(lambda: page.run("return document.activeElement.id") == "message")
    page.keys(Keys.ALT, "n")
    page.wait(lambda: not page.replies)
    assert page.run("return document.activeElement.id") == "message"


def test_screen_readers_hear_the_end_and_not_each_word(site) -> None:
    page = site.page
    site.engine.script, site.engine.limit = reply("one two three"), 2
    page.send("hi")
    page.wait_text(".message.assistant .body", "one")
    assert page.run("return document.querySelector('#status').textContent") == "The reply is being written"
    site.engine.limit = None
    page.wait_reply()
    page.wait(lambda: page.run("return document.querySelector('#status').textContent") == "Reply: one two three")
    assert page.run("return document.querySelector('#status').getAttribute('aria-live')") == "polite"
    assert not page.run("return document.querySelector('#chat').closest('[aria-live]')")
    assert page.run(UNNAMED) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(site, scheme: str) -> None:
    """Text has a contrast of at least 4.5, as WCAG AA asks."""
    page = site.page
    emulate = page.driver.execute_cdp_cmd
    emulate("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    site.engine.script = reply(TEXT, reasoning="I think.", reason="length")
    page.press("Settings")
    page.run("for (const group of document.querySelectorAll('#settings details')) group.open = true")
    page.send("hi")
    page.wait_reply()
    site.engine.script = lambda _: [InternalError("it broke")]
    page.send("and now")
    page.wait_text(".error", "it broke")
    assert page.run(CONTRASTS) == []
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) > 384) == (scheme == "light")
    page.press("Change the colours")  # light
    page.press("Change the colours")  # dark
    page.wait(lambda: page.run("return document.documentElement.dataset.theme") == "dark")
    emulate("Emulation.setEmulatedMedia", {"features": []})


def test_phone(site) -> None:
    page = site.page
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.open()
        wide = f"```\n{'x' * 300}\n```\n\n| {'a | ' * 12}\n|{'---|' * 12}\n| {'wide | ' * 12}\n\n{'y' * 300}\n"
        site.engine.script = reply(wide)
        page.send("z" * 200)
        page.wait_reply()
        overflow = (
            "return document.scrollingElement.scrollWidth > 360 || document.querySelector('#chat').scrollWidth > 360"
        )
        assert page.run(overflow) is False
        assert not page.one("#sidebar").is_displayed()
        page.press("Conversations")
        page.wait(lambda: page.one("#sidebar").is_displayed())
        assert page.run(overflow) is False
        page.keys(Keys.ESCAPE)
        page.press("Settings")
        page.wait(lambda: page.one("#settings").is_displayed())
        page.run("for (const group of document.querySelectorAll('#settings details')) group.open = true")
        assert page.run("return document.querySelector('#settings').getBoundingClientRect().left >= 0")
        assert page.run("const s = document.querySelector('#settings-fields'); return s.scrollWidth <= s.clientWidth")
        page.keys(Keys.ESCAPE)
        page.wait(lambda: not page.one("#settings").is_displayed())
        box = page.run("const b = document.querySelector('.send').getBoundingClientRect(); return [b.width, b.height]")
        assert min(box) >= 24  # WCAG 2.2: target size
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
