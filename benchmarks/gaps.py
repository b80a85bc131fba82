#!/usr/bin/env python3
"""Measure gaps of a stream beside each kind of heavy request.

    python benchmarks/gaps.py [FILE.gguf] [--step-ms 150] [--seconds 10] [--only TEXT] [--json OUT.json]

The kinds come from the OpenAPI description of the server: each body with a text, and that body with each field that
makes work. A stream of one client is watched while requests of one kind, one after another, run for `--seconds`.
Prints a row per kind: the number of requests, their statuses, the 50th and 99th percentile of the stream's gaps and
the longest, in milliseconds, and the 99th percentile in units of `--step-ms`. The first row is the stream alone. Ends
with status 1 if a 99th percentile is above 1.5 times `--step-ms`, and the row of the stream alone is not.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from serving import Prompts, Reply, Server, free_port

LIMIT = 1.5
"""Gaps in units of `--step-ms`."""

N_STREAM = 400

WORDS = "the old owl told a story about a little bear and the river "

BOMB = 'root ::= a a a a a a a a\na ::= "" | [a-z ] | [a-z ] a | a a\n'
"""Ambiguous grammar: the number of its parses grows with each character."""

SCHEMA = {
    "type": "object",
    "properties": {f"field{i}": {"anyOf": [{"type": "string", "minLength": 3}, {"type": "null"}]} for i in range(60)},
    "required": [f"field{i}" for i in range(60)],
}

TOOL = {"description": "Tell the weather.", "parameters": SCHEMA}


def texts(n_words: int) -> dict[str, Any]:
    """Values of text fields, of which a body gets its first."""
    text = (WORDS * (n_words // 12 + 1))[: 5 * n_words]
    return {
        "messages": [{"role": "user", "content": text}],
        "prompt": text,
        "input": text,
        "content": text,
        "query": text,
        "tokens": [1 + i % 200 for i in range(n_words)],
    }


BESIDE: dict[str, Any] = {
    "documents": [WORDS * 20] * 20,
    "texts": [WORDS * 20] * 20,
    "input_prefix": WORDS * 40,
    "input_suffix": WORDS * 40,
}
"""Values of further fields that a body may require."""

HEAVY: dict[str, dict[str, Any]] = {
    "n": {"n": 8},
    "best_of": {"best_of": 8, "n": 1},
    "echo": {"echo": True, "logprobs": 5, "max_tokens": 1},
    "top_logprobs": {"logprobs": True, "top_logprobs": 20},
    "n_probs": {"n_probs": 20},
    "grammar": {"grammar": BOMB},
    "guided_grammar": {"guided_grammar": BOMB},
    "guided_regex": {"guided_regex": "((a|b|[a-z ])*)*c{50}"},
    "json_schema": {"json_schema": SCHEMA},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "record", "schema": SCHEMA}}
    },
    "format": {"format": SCHEMA},
    "text": {"text": {"format": {"type": "json_schema", "name": "record", "schema": SCHEMA}}},
    "dry_multiplier": {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_penalty_last_n": -1},
    "logit_bias": {"logit_bias": {str(i): 0.5 for i in range(200)}},
    "stop": {"stop": [f"stop {i}" for i in range(16)]},
    "stop_sequences": {"stop_sequences": [f"stop {i}" for i in range(16)]},
    "tools": {
        "tools": [{"type": "function", "function": {"name": f"weather{i}", **TOOL}} for i in range(20)],
        "tool_choice": "required",
    },
    "lora": {"lora": [{"id": 0, "scale": 0.37}]},
}
"""Fields that make work, by the field that a body must have for them."""


def kinds(description: dict[str, Any], n_words: int, n_gen: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of each kind of request, by its name.

    Raises SystemExit for a body that requires a field without a value here.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    seen, values, schemas = set[str](), texts(n_words), description["components"]["schemas"]
    lengths = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
    for path, methods in description["paths"].items():
        reference = _body(methods).get("$ref", "")
        schema = schemas.get(reference.rpartition("/")[2], {})
        fields = schema.get("properties", {})
        given = next(({name: values[name]} for name in values if name in fields), None)
        if given is None or (reference, path.rpartition("/")[2]) in seen:
            continue
        seen.add((reference, path.rpartition("/")[2]))
        for name in schema.get("required", ()):
            if name in given or name == "model":
                continue
            if name not in BESIDE:
                raise SystemExit(f"{path} requires {name!r}, which has no value in this script")
            given[name] = BESIDE[name]
        given |= {name: n_gen for name in lengths if name in fields}
        if "options" in fields:
            given["options"] = {"num_predict": n_gen}
        if "model" in schema.get("required", ()):
            given["model"] = ""
        found[path] = path, given
        for name, more in HEAVY.items():
            if name in fields:
                found[f"{path}, {name}"] = path, given | {key: value for key, value in more.items() if key in fields}
    return found


def _body(methods: dict[str, Any]) -> dict[str, Any]:
    content = methods.get("post", {}).get("requestBody", {}).get("content", {})
    return dict(content.get("application/json", {}).get("schema", {}))


class Watched:
    """Endless stream of completions, and the times of its events."""

    def __init__(self, server: Server, prompts: Prompts):
        self._server, self._prompts = server, prompts
        self.times: list[float] = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            reply = Reply(times=_Times(self.times))
            await self._server.complete(self._prompts.new(16), N_STREAM, reply)
            self.times.append(float("nan"))  # between two streams is no gap

    def gaps(self, since: float) -> list[float]:
        """Seconds between neighbouring events, ascending."""
        return sorted(b - a for a, b in itertools.pairwise(self.times) if a >= since and b == b)

    async def stop(self) -> None:
        """End the stream. Raises what has ended it before."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class _Times(list[float]):
    """List that hands on what is appended."""

    def __init__(self, target: list[float]):
        super().__init__()
        self._target = target

    def append(self, time: float) -> None:
        self._target.append(time)


async def one(server: Server, path: str, body: dict[str, Any]) -> int:
    """Send a request, read its reply; the status."""
    async with server.request("POST", path, json.dumps(body).encode()) as (status, _, lines):
        async for _ in lines:
            pass
    return status


async def beside(server: Server, stream: Watched, path: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Gaps of the stream while requests of a kind run."""
    started, statuses = time.perf_counter(), collections.Counter[str]()
    while (left := started + seconds - time.perf_counter()) > 0:
        if not path:
            await asyncio.sleep(left)
            break
        try:
            async with asyncio.timeout(left):
                status = await one(server, path, body)
        except TimeoutError:
            statuses["cut"] += 1
        else:
            statuses[str(status)] += 1
            if status >= 400:
                await asyncio.sleep(0.01)
    gaps = stream.gaps(started) or [time.perf_counter() - started]
    at = [gaps[int(share * (len(gaps) - 1))] * 1000 for share in (0.5, 0.99, 1.0)]
    return {"n": sum(statuses.values()), "statuses": dict(statuses), "p50": at[0], "p99": at[1], "longest": at[2]}


async def measure(server: Server, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Rows by kind."""
    await server.ready()
    async with server.request("GET", "/openapi.json", b"") as (_, _, lines):
        description = json.loads(b"".join([line async for line in lines]))
    all_kinds = {"the stream alone": ("", dict[str, Any]())}
    all_kinds |= kinds(description, options.n_words, options.n_gen)
    rows = {}
    stream = Watched(server, Prompts(1, server.n_vocab))
    try:
        while len(stream.times) < 100:
            await asyncio.sleep(0.05)
        print("| kind | requests | p50 ms | p99 ms | longest ms | p99 / step |\n|---|---|---|---|---|---|")
        for name, (path, body) in all_kinds.items():
            if options.only and path and options.only not in name:
                continue
            row = rows[name] = await beside(server, stream, path, body, options.seconds)
            statuses = ", ".join(f"{n} x {status}" for status, n in row["statuses"].items())
            print(
                f"| {name} | {statuses} | {row['p50']:.0f} | {row['p99']:.0f} | {row['longest']:.0f} | "
                f"{row['p99'] / options.step_ms:.2f} |",
                flush=True,
            )
    finally:
        await stream.stop()
    return rows


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="", help="model; default: the bundled one")
    parser.add_argument("--step-ms", type=float, default=150.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each kind")
    parser.add_argument("-p", "--n-words", type=int, default=300, help="words of heavy requests")
    parser.add_argument("-n", "--n-gen", type=int, default=64, help="tokens that they generate")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="kinds whose name has this text")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "llamacli", "serve", *([options.file] if options.file else [])]
    command += ["--port", str(port), "--threads", str(options.threads), "--step-ms", str(options.step_ms)]
    server = Server("llamacli", command, port, 500)
    try:
        rows = asyncio.run(measure(server, options))
    finally:
        server.stop()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    limit = LIMIT * options.step_ms
    late = [name for name, row in rows.items() if row["p99"] > limit]
    if late and late[0] != next(iter(rows)):
        print(f"gaps above {limit:.0f} ms beside: {'; '.join(late)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
