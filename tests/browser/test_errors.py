"""Errors on the page, in words and with a retry."""

from __future__ import annotations

from keys import Keys
from llamacli.serve.errors import InternalError, QueueFullError
from llamacli.serve.requests import Admitted, TextDelta
from scripts import reply


def test_wrong_key(open_page) -> None:
    site = open_page(api_keys=("right",))
    page = site.page
    page.wait_text("#key-dialog[open]", "This server asks for an API key")
    page.keys("wrong", Keys.ENTER)
    page.wait_text("#key-dialog[open]", "The server does not accept this key.")
    page.keys(Keys.CONTROL, "a")
    page.keys(Keys.NULL, "right", Keys.ENTER)
    page.wait(lambda: page.text("#model") == "demo")
    page.send("hi")
    assert page.wait_reply() == "one two three"
    page.run("sessionStorage.setItem('llamacli-key', 'old')")
    page.send("again")
    page.wait_text("#key-dialog[open]", "The server does not accept this key.")
    page.keys(Keys.CONTROL, "a")
    page.keys(Keys.NULL, "right", Keys.ENTER)
    page.wait(lambda: page.replies[-1] == "one two three" and len(page.replies) == 2)
    page.wait_reply()


def test_full_queue_is_tried_again(site) -> None:
    page = site.page
    site.engine.script = lambda _: [QueueFullError("60 requests wait", retry_after=1)]
    page.send("hi")
    page.wait_text(".error", "The server is busy")
    assert "60 requests wait" in page.text(".error")
    assert "Trying again in" in page.text(".error")
    site.engine.script = reply("at last")
    assert page.wait_reply() == "at last"
    assert not page.all(".error")


def test_full_queue_now_and_never(site) -> None:
    page = site.page
    site.engine.script = lambda _: [QueueFullError("60 requests wait", retry_after=60)]
    page.send("hi")
    page.wait_text(".error", "Trying again in 60 s")
    page.press("Stop the reply")
    page.wait_text(".state", "Stopped.")
    page.press("Regenerate")
    page.wait_text(".error", "Trying again")
    site.engine.script = reply("at last")
    page.press("Try now")
    page.wait(lambda: page.replies == ["at last"])


def test_server_fails_in_mid_stream(site) -> None:
    page = site.page
    site.engine.script = lambda _: [Admitted(0.0), TextDelta(0, "half"), InternalError("it broke")]
    site.engine.limit = 2
    page.send("hi")
    page.wait_text(".message.assistant .body", "half")
    site.engine.limit = None
    # A browser may drop the last event of a connection that is cut.
    page.wait(lambda: any(words in page.text(".error") for words in ("it broke", "The connection was lost")))
    assert page.replies == ["half"]
    site.engine.script = reply(" whole")
    page.press("Continue")
    page.wait(lambda: page.replies == ["half whole"])


def test_network_is_lost(site) -> None:
    page = site.page
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    page.send("hi")
    page.wait_text(".error", "The server cannot be reached")
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**offline, "offline": False})
    page.press("Try again")
    assert page.wait_reply() == "one two three"


def test_refused_fields_are_named(site) -> None:
    page = site.page
    page.press("Settings")
    page.run("for (const group of document.querySelectorAll('#settings details')) group.open = true")
    page.one("#param-logit_bias").send_keys('{"99999": 1}')
    page.send("hi")
    page.wait_text(".error", "logit_bias: '99999' is not a token id")
    assert "The server cannot do this" in page.text(".error")


def test_full_storage_is_said(site) -> None:
    page = site.page
    page.run("IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); };")
    page.send("hi")
    page.wait_text(".toast", "The browser's storage is full: this conversation is not kept.")
    assert page.wait_reply() == "one two three"
