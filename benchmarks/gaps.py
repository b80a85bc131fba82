#!/usr/bin/env python3
"""Measure gaps of a stream beside each kind of heavy request.

    python benchmarks/gaps.py [FILE.gguf] [--step-ms 150] [--seconds 10] [--only TEXT] [--json OUT.json]
                              [--seeing FILE.gguf --mmproj FILE.gguf] [--reranker FILE.gguf]

The kinds come from the OpenAPI description of the server: each body with a text, and that body with each field that
makes work or takes a picture. A stream of one client is watched while requests of one kind, one after another, run
for `--seconds`. Kinds with pictures and those that rank texts go to a second server with a stream of its own, of small
random models unless files are given. Prints a row per kind: the number of requests, their statuses, the 50th and 99th
percentile of the stream's gaps and the longest, in milliseconds, and the 99th percentile in units of `--step-ms`. The
first row of a server is the stream alone. Kinds of which every request is refused are named. Ends with status 1 if a
99th percentile is above 1.5 times `--step-ms`, and the row of the stream alone is not.
"""

# ruff: noqa: E402 - the models are those of the tests

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import io
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from serving import Prompts, Reply, Server, free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

import media_cases
import tiny_variants
from llamacli.testing.tiny_media import drawn

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
    "documents": [WORDS] * 20,
    "texts": [WORDS] * 20,
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


SIDE, N_PICTURES = 512, 4
"""Pixels of a side of a picture, and pictures of a request."""

RANKS = ("rerank", "reranking", "score", "classify")
"""Last words of paths that rank texts."""


def _picture() -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(drawn(SIDE, SIDE)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def seeing(names: set[str], body: dict[str, Any]) -> dict[str, Any] | None:
    """Body with pictures; None if its schema takes none.

    `names` are fields of all schemas that the schema of the body refers to.
    """
    data = _picture()
    address = f"data:image/png;base64,{data}"
    if "messages" in body and "images" in names:
        return body | {"messages": [{"role": "user", "content": WORDS, "images": [data] * N_PICTURES}]}
    if "messages" in body and "source" in names:
        part = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        return body | {"messages": [{"role": "user", "content": [part] * N_PICTURES}]}
    if "messages" in body and "image_url" in names:
        part = {"type": "image_url", "image_url": {"url": address}}
        return body | {"messages": [{"role": "user", "content": [part] * N_PICTURES}]}
    if "input" in body and "image_url" in names:
        part = {"type": "input_image", "image_url": address}
        return body | {"input": [{"role": "user", "content": [part] * N_PICTURES}]}
    if "prompt" in body and "images" in names:
        return body | {"prompt": WORDS, "images": [data] * N_PICTURES}
    return None


def _reached(schema: Any, schemas: dict[str, Any], seen: set[str]) -> set[str]:
    """Fields of a schema and of all that it refers to."""
    if isinstance(schema, list):
        return set[str]().union(*(_reached(each, schemas, seen) for each in schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema.get("properties", ()))
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name and name not in seen:
        seen.add(name)
        found |= _reached(schemas.get(name), schemas, seen)
    return found.union(*(_reached(each, schemas, seen) for each in schema.values()))


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
        if path.rpartition("/")[2].startswith("rerank"):
            given |= {"query": WORDS, "documents": BESIDE["documents"]}
        given |= {name: n_gen for name in lengths if name in fields}
        if "options" in fields:
            given["options"] = {"num_predict": n_gen}
        if "model" in schema.get("required", ()):
            given["model"] = ""
        found[path] = path, given
        if pictures := seeing(_reached({"$ref": reference}, schemas, set()), given):
            found[f"{path}, pictures"] = path, pictures
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


def is_second(name: str) -> bool:
    """Test if a kind of request goes to the second server."""
    path, _, field = name.partition(", ")
    return field == "pictures" or path.rpartition("/")[2] in RANKS


async def measure(server: Server, options: argparse.Namespace, *, second: bool) -> dict[str, dict[str, Any]]:
    """Rows by kind, of one of the servers."""
    await server.ready()
    async with server.request("GET", "/openapi.json", b"") as (_, _, lines):
        description = json.loads(b"".join([line async for line in lines]))
    all_kinds = {f"the stream alone{', second server' * second}": ("", dict[str, Any]())}
    all_kinds |= kinds(description, options.n_words, options.n_gen)
    rows = {}
    stream = Watched(server, Prompts(1, server.n_vocab))
    try:
        while len(stream.times) < 100:
            await asyncio.sleep(0.05)
        for name, (path, body) in all_kinds.items():
            if path and (is_second(name) != second or (options.only and options.only not in name)):
                continue
            if path.rpartition("/")[2] in RANKS:
                body["model"] = "reranker"
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


def second_models(options: argparse.Namespace, folder: Path) -> list[str]:
    """Arguments of the second server, with random models where none are given."""
    if not options.mmproj:
        options.seeing = media_cases.write_text(folder / "seeing.gguf", "idefics3")
        options.mmproj = media_cases.write_mmproj(folder / "mmproj.gguf", "idefics3")
    ranks = options.reranker or tiny_variants.write(folder / "reranker.gguf", "qwen3_rank", tokenizer="spm")
    return [f"seeing={options.seeing}", f"reranker={ranks}", "--mmproj", str(options.mmproj)]


def run(models: list[str], options: argparse.Namespace, *, second: bool) -> dict[str, dict[str, Any]]:
    """Rows of a server."""
    port = free_port()
    command = [sys.executable, "-m", "llamacli", "serve", *models, "--port", str(port)]
    command += ["--threads", str(options.threads), "--step-ms", str(options.step_ms)]
    server = Server("llamacli", command, port, 200 if second else 500)
    try:
        return asyncio.run(measure(server, options, second=second))
    finally:
        server.stop()


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
    parser.add_argument("--seeing", type=Path, help="model of the second server; default: a small random one")
    parser.add_argument("--mmproj", type=Path, help="its encoder of pictures")
    parser.add_argument("--reranker", type=Path, help="reranker of the second server; default: a small random one")
    options = parser.parse_args()
    if (options.seeing is None) != (options.mmproj is None):
        parser.error("--seeing and --mmproj are given together")
    print("| kind | requests | p50 ms | p99 ms | longest ms | p99 / step |\n|---|---|---|---|---|---|")
    limit, failed = LIMIT * options.step_ms, False
    everything = {}
    with tempfile.TemporaryDirectory() as folder:
        for second in (False, True):
            models = second_models(options, Path(folder)) if second else [options.file] if options.file else []
            rows = run(models, options, second=second)
            everything |= rows
            late = [name for name, row in rows.items() if row["p99"] > limit]
            if late and late[0] != next(iter(rows)):
                print(f"gaps above {limit:.0f} ms beside: {'; '.join(late)}", file=sys.stderr)
                failed = True
    refused = [
        name
        for name, row in everything.items()
        if "200" not in row["statuses"] and len(row["statuses"]) > ("cut" in row["statuses"])
    ]
    if refused:
        print(f"refused, so not measured: {'; '.join(refused)}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
