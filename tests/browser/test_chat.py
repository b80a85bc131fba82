"""Conversations on the page: streams, branches, search, export and import, tools, files."""

from __future__ import annotations

import json
import time
from pathlib import Path

from http_server import wait_for
from keys import Keys
from llamacli.serve.requests import GenerationRequest
from llamacli.tools.mcp import read_servers
from mcp_files import write_mcp_file
from scripts import reply


def last_prompt(site) -> str:
    request = site.engine.requests[-1]
    assert isinstance(request, GenerationRequest)
    return site.engine._model.decode(request.prompts[0])


def test_words_appear_as_they_come(site) -> None:
    site.engine.script, site.engine.limit = reply("one two three **four**"), 3
    site.page.send("hi")
    site.page.wait_text(".message.assistant .body", "one two")
    assert site.page.text(".message.assistant .body") == "one two"
    assert site.page.is_writing
    site.engine.limit = 4
    site.page.wait_text(".message.assistant .body", "three")
    assert "four" not in site.page.text(".message.assistant .body")
    site.engine.limit = None
    assert site.page.wait_reply() == "one two three four"
    assert site.page.text(".message.assistant strong") == "four"
    assert "6.0 tokens/s" in site.page.text(".stats")  # the first of four tokens comes of the prompt
    assert "3 cached" in site.page.text(".stats")
    assert site.page.errors() == []


def test_stop_frees_the_place(story) -> None:
    page, server = story
    page.run("localStorage.setItem('llamacli-settings', JSON.stringify({params: {ignore_eos: true, max_tokens: 480}}))")
    page.open()
    page.send("Once upon a time")
    page.wait(lambda: len(page.replies) and len(page.replies[0]) > 10)
    page.press("Stop the reply")
    page.wait_text(".state", "Stopped.")
    kept = page.wait_reply()
    wait_for(lambda: not any(slot["is_processing"] for slot in server.send("/slots").json))
    assert "llamacli_requests_running" in server.send("/metrics").body.decode()
    assert 'llamacli_cancelled_total{model="demo",phase="decode"} 1.0' in server.send("/metrics").body.decode()
    page.press("Continue")
    page.wait(lambda: page.replies[0].startswith(kept) and len(page.replies[0]) > len(kept))
    page.keys(Keys.ESCAPE)
    page.wait_reply()
    wait_for(lambda: not any(slot["is_processing"] for slot in server.send("/slots").json))


def test_reload_in_mid_stream(site) -> None:
    site.engine.script, site.engine.limit = reply("one two three four"), 3
    site.page.send("hi")
    site.page.wait_text(".message.assistant .body", "one two")
    site.page.driver.refresh()
    site.page.wait_ready()
    site.page.wait_text(".message.assistant .body", "one two")
    site.page.wait_text(".state", "The page was closed while this reply was written.")
    wait_for(lambda: site.engine.cancelled)
    site.engine.limit, site.engine.script = None, reply(" and more")
    site.page.press("Continue")
    assert site.page.wait_reply() == "one two and more"
    assert last_prompt(site).endswith("<assistant>one two")


def test_branches(site) -> None:
    page, engine = site.page, site.engine
    engine.script = reply("first")
    page.send("hi")
    page.wait_reply()
    engine.script = reply("second")
    page.press("Regenerate")
    page.wait(lambda: page.replies == ["second"])
    assert page.text(".message.assistant .branches") == "2/2"
    page.press("Previous branch")
    page.wait(lambda: page.replies == ["first"])
    page.press("Edit", ".message.user")
    page.keys(Keys.CONTROL, "a")
    page.keys(Keys.NULL, "hello")
    engine.script = reply("third")
    page.press("Send as a branch")
    page.wait(lambda: page.replies == ["third"])
    page.wait_reply()
    assert page.text(".message.user .branches") == "2/2"
    assert "<user>hello" in last_prompt(site)
    assert "hi" not in last_prompt(site)
    page.press("Previous branch", ".message.user")
    page.wait(lambda: page.replies == ["first"])
    page.driver.refresh()
    page.wait_ready()
    page.wait(lambda: page.replies == ["first"])


def test_conversations_are_kept_searched_renamed_and_deleted(site) -> None:
    page = site.page
    for text in ("A fox in the snow", "An owl on the roof"):
        page.send(text)
        page.wait_reply()
        page.press("New")
    titles = lambda: [one.text for one in page.all(".conversation .open")]  # noqa: E731
    page.wait(lambda: titles() == ["An owl on the roof", "A fox in the snow"])
    page.one("input[type=search]").send_keys("SNOW")
    page.wait(lambda: titles() == ["A fox in the snow"])
    page.press("Rename A fox in the snow")
    page.keys(Keys.CONTROL, "a")
    page.keys(Keys.NULL, "Winter", Keys.ENTER)
    page.wait(lambda: titles() == ["Winter"])
    page.driver.refresh()
    page.wait_ready()
    page.wait(lambda: "Winter" in titles() and len(titles()) == 2)
    page.press("Delete Winter")
    page.press("Delete", "dialog")
    page.wait(lambda: titles() == ["An owl on the roof"])
    page.one("input[type=search]").send_keys("nothing like it")
    page.wait_text(".no-conversations", "No conversation has this text.")


def test_export_and_import(site, tmp_path: Path) -> None:
    page = site.page
    folder = tmp_path / "downloads"
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    page.send("A fox in the snow")
    page.wait_reply()
    page.press("Regenerate")
    page.wait_text(".branches", "2/2")
    page.wait_reply()
    page.press("Export A fox in the snow")
    page.wait(lambda: list(folder.glob("*.json")))
    (exported,) = folder.glob("*.json")
    page.wait(lambda: exported.read_text())
    data = json.loads(exported.read_text())
    assert (exported.name, data["format"], len(data["conversations"])) == (
        "A fox in the snow.json", "llamacli-conversations", 1)  # fmt: skip
    page.press("Delete A fox in the snow")
    page.press("Delete", "dialog")
    page.wait(lambda: not page.all(".conversation"))
    page.one("#import-file").send_keys(str(exported))
    page.wait(lambda: page.replies == ["one two three"])
    assert page.text(".branches") == "2/2"
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({**data, "version": 9}))
    page.one("#import-file").send_keys(str(broken))
    page.wait_text(".toast", "broken.json: The file has version 9; version 1 can be read.")


def test_markdown_from_the_model_does_nothing(site) -> None:
    """Markup, links with code and styles from the model stay text."""
    page = site.page
    evil = (
        "<img src=x onerror=\"window.hit=1\"> </script><script>window.hit=2</script>\n\n[x](javascript:window.hit=3) "
        "<svg/onload=window.hit=4>\n\n```html\n</code></pre><script>window.hit=5</script>\n```\n\n| <b>a</b> | b |\n"
        "|---|---|\n| <iframe srcdoc='<script>parent.hit=6</script>'> | ![i](http://127.0.0.1:9/i.png) |\n\n"
        "<style>body{display:none}</style>\n\nend"
    )  # fmt: skip
    site.engine.script = reply(evil, reasoning="<img src=x onerror=window.hit=7>")
    page.send("<img src=x onerror=window.hit=8>")
    shown = page.wait_reply()
    time.sleep(0.2)
    for text in ("<img src=x", "</script>", "<svg/onload", "</code></pre>", "<b>a</b>", "<iframe", "<style>", "end"):
        assert text in shown
    assert page.run("return window.hit ?? null") is None
    assert not page.all("#chat :is(img, script, iframe, style)")
    assert [one.get_attribute("href") for one in page.all(".markdown a")] == ["http://127.0.0.1:9/i.png"]
    assert page.errors() == []


def test_code_and_tables(site) -> None:
    page = site.page
    site.engine.script = reply(
        "Look:\n\n```python\ndef f():\n    return 1  # one\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n"
    )
    page.send("code")
    page.wait_reply()
    assert page.text(".code pre").strip() == "def f():\n    return 1  # one"
    assert page.text(".code-bar span") == "python"
    assert [one.text for one in page.all(".hl-keyword")] == ["def", "return"]
    assert page.text(".hl-comment") == "# one"
    assert page.text("td.right") == "2"
    page.run(
        "const writeText = async (text) => { window.copied = text; };"
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText}})"
    )
    page.press("Copy the code")
    page.wait(lambda: page.run("return window.copied") == "def f():\n    return 1  # one")


def test_reasoning_is_folded(site) -> None:
    site.engine.script = reply("answer", reasoning="first I think")
    site.page.send("why")
    assert "answer" in site.page.wait_reply()
    assert site.page.run("return document.querySelector('details.reasoning').open") is False
    site.page.one("details.reasoning summary").click()
    site.page.wait_text("details.reasoning .markdown", "first I think")


def test_tools_of_the_server_run_by_a_button(open_page, tmp_path: Path) -> None:
    site = open_page(mcp=read_servers(write_mcp_file(tmp_path, small=["echo"])))
    page = site.page
    site.engine.script = reply("", calls=[("small_echo", {"message": "a\u202eb"})], reason="tool_calls")
    page.send("say it")
    page.wait_text(".call .tool-name", "small_echo")
    assert "small_echo" in last_prompt(site)
    assert "a\\u202eb" in page.text(".call pre")
    page.press("Run on the server")
    page.wait(lambda: page.one(".call textarea").get_attribute("value") == "echo: a\u202eb")
    site.engine.script = reply("said")
    page.press("Send the result")
    page.wait(lambda: page.replies[-1] == "said")
    assert "<tool>echo: a" in last_prompt(site)
    assert page.errors() == []


def test_tools_with_typed_results(site) -> None:
    page = site.page
    page.press("Settings")
    page.run("document.querySelector('details[data-title=Tools]').open = true")
    tools = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
    page.one("#set-tools").send_keys(json.dumps(tools))
    site.engine.script = reply("", calls=[("weather", {"city": "Oslo"})], reason="tool_calls")
    page.send("weather?")
    page.wait_text(".call .tool-name", "weather")
    assert '"city": "Oslo"' in page.text(".call pre")
    page.one(".call textarea").send_keys("sunny")
    site.engine.script = reply("It is sunny.")
    page.press("Send the result")
    page.wait(lambda: page.replies[-1] == "It is sunny.")
    prompt = last_prompt(site)
    assert "<tool>sunny" in prompt
    assert "Oslo" in prompt
    assert "weather" in prompt
    page.one("#set-tools").send_keys("x")
    page.keys(Keys.TAB)
    page.wait_text("#set-tools-error", "The list of tools is not JSON")


def test_settings_reach_the_server(site) -> None:
    page = site.page
    page.press("Settings")
    page.one("#set-system").send_keys("Be brief.")
    titles = page.run(
        "return [...document.querySelectorAll('#settings label, #settings summary')].map((one) => one.textContent)"
    )
    assert titles.count("Reasoning") == 1
    assert titles[titles.index("Reasoning") + 1] == "Reasoning budget"
    page.run("for (const group of document.querySelectorAll('#settings details')) group.open = true")
    assert page.one("#param-temperature").get_attribute("placeholder") == "0.8"
    page.one("#param-temperature").send_keys("0.25")
    page.one("#param-top_k").send_keys("7")
    page.one("#param-stop").send_keys("END")
    page.one("#param-seed").send_keys("5")
    page.one("#param-max_tokens").send_keys("1.5")
    page.wait_text("#param-max_tokens-error", "must be a whole number")
    page.send("hi")
    page.wait_reply()
    request = site.engine.requests[-1]
    assert (request.params.temperature, request.params.top_k, request.stop, request.seed) == (0.25, 7, ("END",), 5)
    assert request.max_tokens is None
    assert "<system>Be brief." in last_prompt(site)
    page.press("New")
    assert page.one("#param-temperature").get_attribute("value") == "0.25"  # a new conversation begins with the last


def test_json_schema(site) -> None:
    page = site.page
    page.press("Settings")
    page.run("document.querySelector('details[data-title=\"JSON schema\"]').open = true")
    page.one("#set-schema").send_keys('{"type": "objekt"}')
    page.send("hi")
    page.wait_text(".error", "The JSON schema is not valid")
    page.one("#set-schema").clear()
    page.one("#set-schema").send_keys('{"type": "object", "properties": {}}')
    page.press("Try again")
    assert page.wait_reply() == "one two three"


def test_files_of_text(site, tmp_path: Path) -> None:
    page = site.page
    notes, data = tmp_path / "notes.md", tmp_path / "data.bin"
    notes.write_text("# Foxes\nred")
    data.write_bytes(b"\x89PNG\0\0")
    drop = """
        const transfer = new DataTransfer();
        transfer.items.add(new File([arguments[0]], 'notes.md'));
        for (const type of ['dragover', 'drop'])
          document.body.dispatchEvent(new DragEvent(type, {dataTransfer: transfer, bubbles: true, cancelable: true}));
    """
    page.run(drop, notes.read_text())
    page.wait_text(".chip", "notes.md")
    page.one("#composer input[type=file]").send_keys(str(data))
    page.wait_text(".toast", "data.bin is not a text file in UTF-8.")
    page.send("Summarize")
    page.wait_reply()
    assert "notes.md:\n```\n# Foxes\nred\n```\n\nSummarize" in last_prompt(site)
    assert "notes.md" in page.text(".attachment summary")


def test_progress_of_a_long_prompt(site) -> None:
    site.engine.script, site.engine.limit = reply("done", progress=(1000, 2500)), 2
    site.page.send("long")
    site.page.wait_text(".progress", "1,000 of 4,000 tokens, 1,000 from the cache")
    site.engine.limit = 3
    site.page.wait_text(".progress", "2,500 of 4,000 tokens")
    assert site.page.run("return document.querySelector('progress').value") == 0.625
    site.engine.limit = None
    assert site.page.wait_reply() == "done"
    assert not site.page.all("progress")


def test_a_reply_goes_on_while_another_conversation_is_open(site) -> None:
    page = site.page
    site.engine.script, site.engine.limit = reply("one two three"), 2
    page.send("slow")
    page.wait_text(".message.assistant .body", "one")
    page.press("New")
    page.wait(lambda: page.all(".welcome:not([hidden])"))
    assert page.all(".conversation .dot")
    site.engine.limit = None
    page.wait(lambda: not page.all(".conversation .dot"))
    page.press("slow", ".conversations")
    assert page.wait_reply() == "one two three"


def test_formulas_are_shown(site) -> None:
    site.engine.script = reply(
        "so \\( x = \\frac{a\\,b}{2} \\), $y_1$ and \\(\\nonsense{\\)\n\n\\[\nE = mc^2\n\\]\n\nend"
    )
    site.page.send("hi")
    site.page.wait_reply()
    site.page.wait(lambda: site.page.run("return document.querySelectorAll('.body math').length") == 3)
    assert site.page.run("return document.querySelectorAll('.body mfrac').length") == 1
    assert site.page.text(".formula.unread") == "\\nonsense{"
    assert site.page.run("return document.querySelector('.math-block math').getAttribute('display')") == "block"
    assert site.page.errors() == []


def test_documents_are_refused_with_the_reason(site, tmp_path: Path) -> None:
    (tmp_path / "Paper.PDF").write_bytes(b"%PDF-1.7")
    site.page.one("#composer input[type=file]").send_keys(str(tmp_path / "Paper.PDF"))
    site.page.wait_text(".toast", "Paper.PDF is a PDF file, and the page reads text only: make text of it by pdftotext")
    site.page.run("document.querySelector('.toast').dispatchEvent(new AnimationEvent('animationend'))")
    assert site.page.run("return document.querySelectorAll('.toast').length") == 0


def test_starter_fills_the_field(site) -> None:
    site.page.press("Tell me a story about a fox.")
    assert site.page.run("return document.querySelector('#message').value") == "Tell me a story about a fox."


def test_saved_system_prompts(site) -> None:
    page = site.page
    page.run("document.querySelector('#show-settings').click()")
    page.run(
        "const f = document.querySelector('#set-system'); f.value = 'Be brief.'; f.dispatchEvent(new Event('input'))"
    )
    page.press("Save")
    page.run("const f = document.querySelector('#set-system'); f.value = ''; f.dispatchEvent(new Event('input'))")
    page.run(
        "const s = document.querySelector('[aria-label=\"Saved system prompts\"]');"
        "s.value = '0'; s.dispatchEvent(new Event('change'))"
    )
    assert page.run("return document.querySelector('#set-system').value") == "Be brief."
    page.press("Delete")
    assert page.run("return localStorage.getItem('llamacli-prompts')") == "[]"
