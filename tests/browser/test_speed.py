"""Time to the first paint, and long tasks in long replies."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

from scripts import reply

FIRST_PAINT_MS = 1000
LONG_TASK_MS = 50
N_TOKENS = 10_000

CONTROL = """
import select, sys, time
longest, last = 0.0, None
while not select.select([sys.stdin], [], [], 0.04)[0]:
    last = end = time.perf_counter()
    while last < end + 0.01:
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
print(longest * 1000)
"""
"""Program that computes for 10 of 50 ms, and prints for how many ms it was kept from running at most."""


def long_reply(n_words: int) -> str:
    """Markdown of `n_words` words: prose, lists, code and tables in turn."""
    rng = random.Random(1)
    words = ["a", "fox", "in", "the", "snow", "**bold**", "`code`", "_soft_", "[link](https://e.org)", "hill"]
    parts: list[str] = []
    total = 0
    while total < n_words:
        some = [rng.choice(words) for _ in range(120)]
        rows = [" ".join(some[i : i + 8]) for i in range(0, 120, 8)]
        parts += [
            "## Part\n\n" + " ".join(some),
            "\n".join(f"- {row}" for row in rows),
            "```python\n" + "\n".join(f"def f(x):  # {row}" for row in rows) + "\n```",
            "| a | b |\n|---|---|\n" + "\n".join(f"| {row} | 1 |" for row in rows),
        ]
        total += 4 * 130
    return "\n\n".join(parts)


def test_first_paint_needs_this_server_only(site) -> None:
    """First paint within a second, without requests to other hosts."""
    page = site.page
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    page.open()
    paint = page.wait(lambda: page.run("return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"))
    print(f"first contentful paint after {paint:.0f} ms")
    assert paint < FIRST_PAINT_MS
    loaded = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert len(loaded) > 20
    assert all(name.startswith(page.url) for name in loaded)


def test_long_reply_without_long_tasks(site) -> None:
    """10,000 words without a task of the main thread above 50 ms.

    They come at thousands a second. The browser's observer counts scripts, styles, layout and painting, by the clock:
    work of other programs that comes between counts too. So the longest time for which a program beside it was kept
    from running is added to the limit, and there are three attempts.
    """
    page, engine = site.page, site.engine
    page.run(
        "window.tasks = []; const note = (list) => window.tasks.push(...list.getEntries().map((one) => one.duration));"
        "new PerformanceObserver(note).observe({type: 'longtask', buffered: false})"
    )
    engine.script = reply(long_reply(N_TOKENS))
    for _ in range(3):
        page.press("New")
        page.run("window.tasks.length = 0")
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-c", CONTROL], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as control:
            page.send("write a lot")
            page.wait_reply(60)
            stall = float(control.communicate(b"end")[0])
        seconds = time.monotonic() - began
        words = page.run("return document.querySelector('.markdown').innerText.split(/\\s+/).length")
        assert words > 0.8 * N_TOKENS
        tasks = page.run("return window.tasks")
        print(f"{words} words in {seconds:.1f} s, tasks above {LONG_TASK_MS} ms: {sorted(map(round, tasks))}, "
              f"longest stall of a program beside it: {stall:.0f} ms")  # fmt: skip
        if max(tasks, default=0) <= LONG_TASK_MS + stall:
            break
    else:
        pytest.fail(f"tasks of {sorted(map(round, tasks))} ms in each attempt")
