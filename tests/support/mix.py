"""Random mix of requests of every kind against a server under load.

    make mix                                   # half an hour
    make mix MIX_SECONDS=30 ARGS="--seed 7"

Two servers have the same tiny models: of texts with LoRA adapters, recurrent, with sliding windows, one that sees
pictures, T5, embeddings and a reranker. Clients send one chats, completions, pictures, embeddings as inputs, grammars,
rankings, batches and more, in the forms of four APIs, whole or as streams, and cut some off. It drafts, preempts, maps
its weights, keeps the beginnings of prompts on disk, and is killed and started again. The other one computes each
request alone, without any of that. Every whole reply must have the same bytes, but for names, times and counts of the
work. Ends with status 1 if one differs, or a server ends by itself.

Bad inputs come together: ambiguous grammars and schemas that are slow to compile, with pictures and in batches, which
go on after a kill; any of 32 adapters in texts that are preempted.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from PIL import Image

import tiny_variants
from adapters import write_adapter
from llamacli.testing.chats import CHATML
from llamacli.testing.tiny_media import PICTURES, drawn
from media_cases import write_mmproj, write_text
from tiny_chat import chat_keys

CUT = 0.25
N_CLIENTS = 6
ROUND_S = 300.0
"""Seconds after which other options are tried."""
N_ADAPTERS = 32
N_BODIES = 150
"""Different requests of a kind, so that most come several times."""
READY = re.compile(r"serving .* on http://127\.0\.0\.1:(\d+)")
OWN = frozenset(
    {"id", "created", "created_at", "completed_at", "timings", "system_fingerprint", "usage", "model", "meta"}
    | {"item_id", "response_id", "id_slot", "tokens_cached", "tokens_evaluated", "generation_settings"}
    | {"prompt_eval_count", "prompt_eval_cached", "prompt_eval_duration", "eval_duration"}
    | {"total_duration", "load_duration"}
)
"""Keys of replies that may differ: names, times, counts of what was computed."""

STORY = "the owl and the bear told a long story about a river and a fox "
AMBIGUOUS = f"root ::= {'x ' * 16}\nx ::= y y y y\ny ::= z z z z\nz ::= [a-z]? [a-z]? [a-z]? [a-z ]?"
"""Grammar whose masks take long."""
GRAMMARS = [
    AMBIGUOUS,
    'root ::= [a-z ]+ "."',
    'root ::= ("a" | "b")+ [0-9]',
    'root ::= item{3,6}\nitem ::= [a-f] [0-9] " "',
]
SCHEMA = {"type": "object", "properties": {"fox": {"type": "string", "maxLength": 9}}, "required": ["fox"]}
SLOW = {"properties": {f"k{i}": {"type": "string", "pattern": f"^(a|b|{i}){{0,{20 + i % 10}}}$"} for i in range(150)}}
"""Schema that is slow to compile."""


def write_models(folder: Path) -> list[str]:
    """Write the models; the options of a server that has them."""
    files = []
    for name, variant, architecture in (("words", "gqa", "llama"), ("recurrent", "qwen35", "qwen35"),
                                        ("windows", "gemma3", "gemma3")):  # fmt: skip
        keys = {**chat_keys(CHATML), f"{architecture}.context_length": 512}
        files.append(tiny_variants.write(folder / f"{name}.gguf", variant, tokenizer="spm", metadata=keys))
    for name, variant, tokenizer in (("t5", "t5", "test"), ("embeds", "bert", "test"), ("ranks", "bert_rank", "spm")):
        files.append(tiny_variants.write(folder / f"{name}.gguf", variant, tokenizer=tokenizer))
    (folder / "sight").mkdir()
    write_mmproj(folder / "sight" / "mmproj-sees.gguf", "idefics3")
    files.append(write_text(folder / "sight" / "sees.gguf", "idefics3"))
    adapters = [
        write_adapter(folder / f"lora{i}.gguf", files[0], seed=str(i), rank=1 + i % 5) for i in range(N_ADAPTERS)
    ]
    return [
        *map(str, files),
        *(word for path in adapters for word in ("--lora", str(path))),
        "--lora-init-without-apply",
    ]


class Program:
    """`llamacli serve` in a process.

    `kill` ends it by a signal and starts it again.
    """

    def __init__(self, options: Sequence[str], log: Path):
        self._command = [sys.executable, "-m", "llamacli", "serve", *options, "--port", "0", "--mode", "fp32"]
        self._log = log
        self.lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens. Raises RuntimeError."""
        with self._log.open("ab") as log:
            start = log.tell()
            self.process = subprocess.Popen(self._command, stderr=log, stdout=log)
        for _ in range(3000):
            text = self._log.read_bytes()[start:].decode(errors="replace")
            if found := READY.search(text):
                self.port = int(found[1])
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start: {text[-2000:]}")

    def kill(self) -> None:
        """End it by SIGKILL, and start it again."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.start()

    def send(self, path: str, body: Any, timeout: float = 300, cut_after: float | None = None) -> tuple[int, bytes]:
        """Status and body of a reply; 0 where the client has left."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "multipart/form-data; boundary=mix" if isinstance(body, bytes) else "application/json"
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            connection.request("GET" if body is None else "POST", path, data, {"content-type": kind})
            if cut_after is not None:
                time.sleep(cut_after)
                return 0, b""
            response = connection.getresponse()
            return response.status, response.read()

    def stop(self) -> int:
        """End it by SIGTERM; its exit code."""
        self.process.terminate()
        return self.process.wait(60)


def uri(draw: random.Random) -> str:
    """Picture as a data address."""
    file = io.BytesIO()
    Image.fromarray(drawn(*draw.choice(list(PICTURES.values())), seed=draw.randrange(3))).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def rows(draw: random.Random) -> str:
    """Embeddings as an input, in NumPy's format."""
    file = io.BytesIO()
    np.save(file, np.random.default_rng(draw.randrange(9)).normal(0, 0.3, (draw.randint(1, 12), 64)).astype("f4"))
    return base64.b64encode(file.getvalue()).decode()


def sampling(draw: random.Random) -> dict[str, Any]:
    """Fields that all kinds of texts take."""
    fields: dict[str, Any] = {"seed": draw.randrange(4), "max_tokens": draw.choice([1, 7, 20, 45])}
    more: list[dict[str, Any]] = [
        {}, {}, {"temperature": 0}, {"temperature": 1.3, "top_p": 0.9}, {"min_p": 0.1, "top_k": 0},
        {"repeat_penalty": 1.2, "dry_multiplier": 0.7}, {"mirostat": 2}, {"xtc_probability": 0.5}, {"top_n_sigma": 1.5},
    ]  # fmt: skip
    return fields | draw.choice(more)


def text(draw: random.Random) -> str:
    """Prompt; several begin alike."""
    return STORY * draw.choice([0, 1, 1, 3]) + draw.choice(["once", "the dog", "é 🦊", "a fox", "b c d"])


def constraint(draw: random.Random) -> dict[str, Any]:
    """Grammar, schema, or none."""
    schema = {"json_schema": draw.choice([SCHEMA, SCHEMA, {"type": "object", **SLOW}])}
    return draw.choice([{}, {}, {"grammar": draw.choice(GRAMMARS)}, schema])


def adapters(draw: random.Random) -> dict[str, Any]:
    """Some of the adapters, or none."""
    chosen = draw.sample(range(N_ADAPTERS), draw.choice([0, 1, 2, N_ADAPTERS]))
    return {"lora": [{"id": i, "scale": draw.choice([0.5, 1, -0.3])} for i in chosen]} if chosen else {}


def some_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    model = draw.choice(["words", "words", "recurrent", "windows"])
    lora = adapters(draw) if model == "words" else {}
    user = {"role": "user", "content": text(draw)}
    kind = draw.choice(
        ["chat", "completion", "native", "messages", "ollama", "generate", "responses", "echo", "picture", "rows", "t5",
         "embed", "rank", "tokens", "infill"]
    )  # fmt: skip
    fields = {"model": model, **sampling(draw)}
    stream = {"stream": draw.random() < 0.5}
    match kind:
        case "chat":
            return "/v1/chat/completions", {**fields, **constraint(draw), **stream, **lora, "messages": [user]}
        case "completion":
            n = draw.choice([1, 1, 2, 3])
            return "/v1/completions", {**fields, **constraint(draw), **stream, **lora, "prompt": text(draw), "n": n}
        case "native":
            body = {**fields, **constraint(draw), **stream, "prompt": text(draw), "n_probs": draw.choice([0, 3])}
            return "/completion", body
        case "messages":
            top = {"max_tokens": 1 + draw.randrange(30), "temperature": 0.9, "seed": 3}
            return "/v1/messages", {"model": model, **top, "messages": [user], "system": "Be kind."}
        case "ollama":
            options = {"seed": 1 + draw.randrange(4), "num_predict": 1 + draw.randrange(30), "temperature": 0.8}
            return "/api/chat", {"model": model, "messages": [user], "options": options, **stream}
        case "generate":
            options = {"seed": 1 + draw.randrange(4), "num_predict": 1 + draw.randrange(30)}
            return "/api/generate", {"model": model, "prompt": text(draw), "options": options, "raw": True, **stream}
        case "responses":
            return "/v1/responses", {
                "model": model,
                "input": text(draw),
                "max_output_tokens": 16,
                "seed": 2,
                "store": False,
            }
        case "echo":
            top = {"echo": True, "logprobs": draw.choice([1, 5]), "max_tokens": draw.choice([0, 5])}
            return "/v1/completions", {**fields, **top, "prompt": [text(draw), text(draw)]}
        case "picture":
            parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": uri(draw)}}]
            if draw.random() < 0.3:
                parts.append({"type": "image_url", "image_url": {"url": uri(draw)}})
            body = {**fields, **constraint(draw), "model": "sees", "messages": [{"role": "user", "content": parts}]}
            return "/v1/chat/completions", body
        case "rows":
            return "/v1/completions", {**fields, "model": "words", "prompt_embeds": rows(draw)}
        case "t5":
            ids = [3 + draw.randrange(60) for _ in range(draw.randint(1, 40))]
            return "/v1/completions", {**fields, "model": "t5", "prompt": ids}
        case "embed":
            inputs = [[1 + draw.randrange(30) for _ in range(draw.randint(1, 30))] for _ in range(draw.randint(1, 5))]
            return "/v1/embeddings", {"model": draw.choice(["embeds", "words"]), "input": inputs}
        case "rank":
            return "/v1/rerank", {"model": "ranks", "query": "a", "documents": [text(draw)[:60] for _ in range(4)]}
        case "infill":
            return "/v1/chat/completions/input_tokens", {"model": model, "messages": [user]}
    return "/tokenize", {"model": model, "content": text(draw)}


def whole(value: Any) -> Any:
    """Reply without what may differ."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items() if key not in OWN}
    return [whole(item) for item in value] if isinstance(value, list) else value


def streamed(reply: bytes) -> dict[str, str]:
    """Texts of a stream, by choice: pieces depend on the time."""
    texts: dict[str, str] = {}
    for line in reply.decode().splitlines():
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            continue
        event = json.loads(data)
        for one in event.get("choices") or [event]:
            part = one.get("delta") or one.get("message") or one
            found = next((part[key] for key in ("content", "text", "response") if part.get(key)), "")
            at = str(one.get("index", 0))
            texts[at] = texts.get(at, "") + found
    return texts


@attrs.define
class Mix:
    """Requests, the replies to each alone, and what differs."""

    loaded: Program
    alone: Program
    ends: float
    outcomes: Counter[str] = attrs.field(factory=Counter)
    faults: list[str] = attrs.field(factory=list)
    expected: dict[str, Any] = attrs.field(factory=dict)
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    refusals: dict[str, str] = attrs.field(factory=dict)
    n_kills: int = 0
    """Kills and starts after them: while the number is odd, the server does not listen."""

    def client(self, seed: int) -> None:
        """Send requests until the end."""
        draw = random.Random(seed)
        while time.monotonic() < self.ends and not self.faults:
            path, body = some_request(random.Random(draw.randrange(15 * N_BODIES)))
            if draw.random() < 0.02:
                self.batch(draw, self.n_kills)
                continue
            cut = draw.random() * 0.4 if draw.random() < CUT else None
            kills = self.n_kills
            try:
                status, reply = self.loaded.send(path, body, cut_after=cut)
            except (OSError, http.client.HTTPException) as error:
                time.sleep(0.5)
                if kills == self.n_kills and not kills % 2:
                    self.faults.append(f"{path}: {error!r}: {json.dumps(body)[:2000]}")
                self.outcomes["killed"] += 1
                continue
            self.outcomes["cut off" if cut is not None else f"{path} {status}"] += 1
            if status >= 400:
                self.refusals.setdefault(f"{path} {status}", reply[:300].decode(errors="replace"))
            if cut is None and status not in (0, 503):  # 503: no place among the models in memory
                self.compare(path, body, status, reply)

    def batch(self, draw: random.Random, n_kills: int) -> None:
        """Compare the replies to the lines of a batch, which survives kills."""
        endpoint = draw.choice(["/v1/completions", "/v1/chat/completions"])
        found = (some_request(random.Random(draw.randrange(15 * N_BODIES))) for _ in range(100))
        bodies = [body for path, body in found if path == endpoint and not body.get("stream")]
        lines = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": endpoint, "body": body})
            for i, body in enumerate(bodies)
        ]
        parts = {"purpose": ("", "batch"), "file": ('; filename="a.jsonl"', "\n".join(lines))}
        form = "".join(
            f'--mix\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
            for name, (more, value) in parts.items()
        )
        try:
            file = json.loads(self.loaded.send("/v1/files", f"{form}--mix--\r\n".encode())[1])["id"]
            wanted = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
            batch = json.loads(self.loaded.send("/v1/batches", wanted)[1])
        except (OSError, http.client.HTTPException) as error:
            if n_kills == self.n_kills and not n_kills % 2:
                self.faults.append(f"a batch: {error!r}")
            self.outcomes["killed"] += 1
            return
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            if time.monotonic() > self.ends + 120:
                self.faults.append(f"a batch does not end: {batch}")
                return
            time.sleep(0.1)
            with contextlib.suppress(OSError, http.client.HTTPException):  # while it starts again
                batch = json.loads(self.loaded.send(f"/v1/batches/{batch['id']}", None)[1])
        names = [name for kind in ("output", "error") if (name := batch.get(f"{kind}_file_id"))]
        results = [line for name in names for line in self.content(name)]
        if sorted(int(one["custom_id"]) for one in results) != [*range(len(bodies))]:
            self.faults.append(f"lines of a batch are missing or twice: {batch}")
        for one in results:
            response = one["response"]
            self.outcomes[f"batch {endpoint} {response['status_code']}"] += 1
            reply = json.dumps(response["body"]).encode()
            self.compare(endpoint, bodies[int(one["custom_id"])], response["status_code"], reply)

    def content(self, file: str) -> list[dict[str, Any]]:
        """Lines of a file, after a kill from the server that follows."""
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return [
                    json.loads(line) for line in self.loaded.send(f"/v1/files/{file}/content", None)[1].splitlines()
                ]
            time.sleep(0.1)

    def compare(self, path: str, body: dict[str, Any], status: int, reply: bytes) -> None:
        """Compare a reply with that to the request alone."""
        key = json.dumps([path, body])
        with self.alone.lock:
            if key not in self.expected:
                self.expected[key] = self.read(body, *self.alone.send(path, body))
        found, expected = self.read(body, status, reply), self.expected[key]
        if "seconds to compile" in f"{found}{expected}":
            self.outcomes["slow to compile"] += 1  # on a busy machine
        elif found != expected:
            self.faults.append(f"{path}: {key[:3000]}\n  alone:  {expected}\n  loaded: {found}")

    @staticmethod
    def read(body: dict[str, Any], status: int, reply: bytes) -> tuple[int, Any]:
        """Status and content of a reply."""
        try:
            return status, streamed(reply) if body.get("stream") and status == 200 else whole(json.loads(reply))
        except ValueError:
            return status, reply[-1000:]


def loaded_options(draw: random.Random, folder: Path) -> list[str]:
    """Options of the server under load."""
    words = folder / "words.gguf"
    drafts = draw.choice([["--lookup"], ["--draft", str(words)], ["--draft", str(words), "--draft-max", "4"]])
    cache = ["--prompt-cache", str(folder / "prompts"), "--prompt-cache-size", "16M"]
    return [
        *drafts, *cache, "--load", draw.choice(["map", "auto"]), "--max-running", draw.choice(["3", "6"]),
        "--kv-memory", draw.choice(["1M", "2M", "8M"]), "--step-ms", draw.choice(["1", "150"]), "--threads", "2",
        *draw.choice([[], ["--models-max", "3"], ["--idle-unload", "0.5"]]), "--data", str(folder / "data"),
    ]  # fmt: skip


@contextlib.contextmanager
def programs(folder: Path, draw: random.Random) -> Iterator[tuple[Program, Program]]:
    """Both servers."""
    models = write_models(folder)
    options = loaded_options(draw, folder)
    print("loaded server:", " ".join(options), flush=True)
    started: list[Program] = []
    try:
        started.append(Program([*models, *options], folder / "loaded.log"))
        started.append(Program([*models, "--threads", "1", "--max-running", "6"], folder / "alone.log"))
        yield started[0], started[1]
    finally:
        for program in started:
            if program.process.poll() is None:
                program.process.kill()
                program.process.wait()


def run(seconds: float, seed: int, folder: Path) -> list[str]:
    """Run the clients; the faults that were found."""
    draw = random.Random(seed)
    with programs(folder, draw) as (loaded, alone):
        mix = Mix(loaded, alone, time.monotonic() + seconds)
        clients = [threading.Thread(target=mix.client, args=[seed * N_CLIENTS + i]) for i in range(N_CLIENTS)]
        for client in clients:
            client.start()
        next_kill = time.monotonic() + min(60, seconds / 2)
        while any(client.is_alive() for client in clients):
            time.sleep(0.2)
            if loaded.process.poll() is not None:
                mix.faults.append(f"the server ended with status {loaded.process.returncode}")
                break
            if next_kill < time.monotonic() < mix.ends - 5:
                mix.n_kills += 1
                loaded.kill()
                mix.n_kills += 1
                next_kill = time.monotonic() + draw.uniform(20, 90)
        for client in clients:
            client.join()
        print(f"{sum(mix.outcomes.values())} requests, {len(mix.expected)} different, {mix.n_kills // 2} kills")
        for name, n in sorted(mix.outcomes.items()):
            print(f"  {n:6} {name} {mix.refusals.get(name, '')}")
        if not mix.faults:
            for name, program in (("loaded", loaded), ("other", alone)):
                if code := program.stop():
                    mix.faults.append(f"the {name} server ended with status {code}")
        logs = [(folder / name).read_text(errors="replace") for name in ("loaded.log", "alone.log")]
        found = [log.find("Traceback") for log in logs]
        mix.faults += [
            f"a traceback:\n{log[max(0, at - 500) : at + 3000]}" for log, at in zip(logs, found, strict=True) if at >= 0
        ]
        if mix.faults:
            warnings = re.findall(r".*(?:warning|error):.*", "\n".join(logs))
            mix.faults.append("\n".join(["warnings in the logs:", *(line[:300] for line in warnings[-20:])]))
    return mix.faults


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m mix", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0, metavar="N", help="default: 1800")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of requests and options (default: 1)")
    given = parser.parse_args()
    faults, ends, seed = list[str](), time.monotonic() + given.seconds, given.seed
    while not faults and (left := ends - time.monotonic()) > min(20, given.seconds / 2):
        with tempfile.TemporaryDirectory(prefix="llamacli-mix") as folder:
            faults = run(min(left, ROUND_S), seed, Path(folder))
        seed += 1
    print("\n".join(faults) or "no reply differs")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
