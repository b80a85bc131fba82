"""Chromium under Selenium, and the web page of the server in it."""

from __future__ import annotations

import base64
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)


def missing() -> str:
    """Reason why no browser can be started, "" if one can."""
    lacking = [str(path) for path in (CHROMIUM, DRIVER) if shutil.which(path) is None]
    return f"{' and '.join(lacking)}: not installed (apt-get install chromium chromium-driver)" if lacking else ""


@contextlib.contextmanager
def chromium(profile: Path, width: int = 1280, height: int = 860) -> Iterator[webdriver.Chrome]:
    """Chromium with a fresh profile in this folder; its console is logged."""
    options = Options()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(profile / "downloads")})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


_GIVE = """
const bytes = Uint8Array.from(atob(arguments[1]), (one) => one.charCodeAt(0));
const files = new DataTransfer();
files.items.add(new File([bytes], arguments[2], { type: arguments[3] }));
const target = document.querySelector("#message");
const event = arguments[0] === "paste"
  ? new ClipboardEvent("paste", { clipboardData: files, bubbles: true, cancelable: true })
  : new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true });
target.dispatchEvent(event);
"""


class PageDriver:
    """Web page in the browser, by what people see and do."""

    def __init__(self, driver: webdriver.Chrome, url: str):
        self.driver, self.url = driver, url

    def open(self) -> None:
        self.driver.get(self.url)
        self.wait_ready()

    def open_empty(self) -> None:
        """Open the page without what it keeps in the browser."""
        self.driver.get(self.url + "icon.svg")
        self.driver.execute_cdp_cmd(
            "Storage.clearDataForOrigin", {"origin": self.url.rstrip("/"), "storageTypes": "indexeddb,local_storage"}
        )
        self.run("sessionStorage.clear()")
        self.open()
        self.errors()

    def wait_ready(self) -> None:
        self.wait(lambda: self.run("return document.documentElement.dataset.ready") == "true")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        self.wait(lambda: self.all(selector), f"no {selector}")
        return self.all(selector)[-1]

    def text(self, selector: str) -> str:
        """Text of the last such element, "" if there is none."""
        found = self.run(
            "const found = document.querySelectorAll(arguments[0]); return found[found.length - 1]?.innerText", selector
        )
        return found or ""

    def wait(self, condition: Callable[[], Any], message: str = "", seconds: float = 15.0) -> Any:
        """Wait until a condition holds; its value."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(StaleElementReferenceException):
                if value := condition():
                    return value
            assert time.monotonic() < deadline, message or "the condition does not come true"
            time.sleep(0.02)

    def wait_text(self, selector: str, wanted: str, seconds: float = 15.0) -> None:
        self.wait(lambda: wanted in self.text(selector), f"{selector} has no {wanted!r}", seconds)

    def button(self, label: str, within: str = "body") -> WebElement:
        """The last button that is shown with this label or text."""

        def find() -> WebElement | None:
            return self.run(
                "return [...document.querySelectorAll(`${arguments[1]} button`)].reverse().find((one) =>"
                " one.offsetParent && [one.getAttribute('aria-label'), one.textContent.trim()].includes(arguments[0]))",
                label,
                within,
            )

        found: WebElement = self.wait(find, f"no button {label!r}")
        return found

    def press(self, label: str, within: str = "body") -> None:
        self.run("arguments[0].click()", self.button(label, within))

    def keys(self, *keys: str) -> None:
        """Type at the element that has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def send(self, text: str) -> None:
        self.one("#message").send_keys(text, Keys.ENTER)

    def give(self, way: str, name: str, content: bytes, kind: str) -> None:
        """Paste or drop a file of a media type."""
        self.run(_GIVE, way, base64.b64encode(content).decode(), name, kind)

    @property
    def chips(self) -> list[str]:
        """Names of the attached files."""
        return [one.text for one in self.all(".chip")]

    def wait_chips(self, *names: str) -> None:
        self.wait(lambda: self.chips == [*names], f"no chips {names}: {self.chips}")

    @property
    def replies(self) -> list[str]:
        return [one.text for one in self.all(".message.assistant .body")]

    @property
    def is_writing(self) -> bool:
        return bool(self.all(".send.running"))

    def wait_reply(self, seconds: float = 20.0) -> str:
        """Text of the last reply, when it is complete."""
        self.wait(lambda: not self.is_writing and self.replies, "the reply does not end", seconds)
        self.wait(lambda: not self.all(".message.writing"))
        return self.replies[-1]

    def errors(self) -> list[str]:
        """Errors in the console, without failed requests."""
        entries = self.driver.get_log("browser")
        return [one["message"] for one in entries if one["level"] == "SEVERE" and one["source"] != "network"]
