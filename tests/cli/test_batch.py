"""`llamacli batch`: results in order, lines that fail, runs that were killed."""

import json
import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from http_server import wait_for

COMMON = "Once upon a time there was a small dog who lived in a red house near the sea. " * 4


def write(path, n: int, broken: int | None = None) -> None:
    bodies = [{"prompt": f"{COMMON}Day {i}:", "max_tokens": 4, "seed": i} for i in range(n)]
    lines = [
        json.dumps({"custom_id": f"r{i}", "url": "/v1/completions", "body": body}) for i, body in enumerate(bodies)
    ]
    if broken is not None:
        lines[broken] = "{broken"
    path.write_text("\n".join(lines) + "\n")


def texts(path) -> list:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(one["custom_id"], one["response"] and one["response"]["body"]["choices"][0]["text"]) for one in found]


def run(path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "llamacli", "batch", str(path)], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )


@pytest.mark.medium
def test_killed_run_goes_on_and_the_prefix_is_evaluated_once(tmp_path) -> None:
    path, results = tmp_path / "in.jsonl", tmp_path / "in.results.jsonl"
    n = 60
    write(path, n, broken=40)
    whole = run(path)
    told = whole.communicate()[1]
    assert whole.returncode == 1, told
    assert f"{n - 1} answered, 1 failed" in told
    words = told.split()
    cached, total = int(words[words.index("of") - 1]), int(words[words.index("of") + 1])
    assert total - cached < 7 * n  # of about 90 tokens a line
    expected = texts(results)
    assert [name for name, _ in expected] == [None if i == 40 else f"r{i}" for i in range(n)]
    results.unlink()

    process = run(path)
    store = tmp_path / "in.results.jsonl.work" / "store.sqlite"

    def n_done() -> int:
        try:
            with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as database:
                return database.execute("SELECT count(*) FROM results").fetchone()[0]
        except sqlite3.Error:
            return 0

    wait_for(lambda: n_done() > 10)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 10 < n_done() < n
    other = tmp_path / "other.jsonl"
    write(other, 3)
    refused = subprocess.run(
        [sys.executable, "-m", "llamacli", "batch", str(other), "-o", str(results)],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert (refused.returncode, "of another file" in refused.stderr) == (1, True)
    rest = run(path)
    rest.communicate()
    assert texts(results) == expected
    assert not store.parent.exists()
