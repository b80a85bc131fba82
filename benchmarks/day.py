#!/usr/bin/env python3
"""Simulate a day of a server with many models.

    python benchmarks/day.py [--seconds 1200] [--seed 0]

A server of four models, of which two may be loaded, keeps its store and prompts in folders. In each round clients ask
for models at random, so that they are loaded and unloaded; a LoRA adapter is added to one model or removed from it, and
gets another scale; one model is unloaded by name, one file is replaced and the folder is read again; a batch runs
beside, and is deleted with its files. Every sixth round the server is killed or ended while a batch runs, and started
again: the batch must have each line once. Equal requests must have equal texts. Of each life of the server, memory
(64 MiB of room), descriptors and threads at its end are compared with those after its first rounds; of all of it, the
folders' bytes. Ends with status 1 if anything of that fails.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import gguf
import llamacli
from llamacli.testing.models import write_gguf

DEMO = Path(llamacli.__file__).parent / "data" / "demo.gguf"
READY = re.compile(r"on http://127\.0\.0\.1:(\d+)")
MODELS, LOADED, CLIENTS, LINES = ("a", "b", "c", "d"), 2, 4, 12
LIFE, WARM = 6, 3
"""Rounds of a life of the server, and those of them before what is compared with the end."""
ADAPTED, MATRIX, SCALES, PRESETS = MODELS[0], "blk.0.attn_output.weight", (0.0, 0.5, 1.0), "presets.ini"
"""Model that has an adapter in some rounds, the matrix that it changes, its scales, and the file that names it."""
GROWTH, DISK = 64 << 20, 64 << 20


class Server:
    """Server process, with requests to it."""

    def __init__(self, folder: Path):
        command = [
            sys.executable, "-m", "llamacli", "serve", "--models-dir", str(folder / "models"),
            "--models-max", str(LOADED), "--models-preset", str(folder / PRESETS),
            "--data", str(folder / "data"), "--prompt-cache", str(folder / "prompts"), "--prompt-cache-size", "32M",
            "--port", "0", "--max-running", "4", "-t", "1",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        ready = next((found for line in self.process.stderr if (found := READY.search(line))), None)
        assert ready is not None, "the server did not start"
        self._address = f"http://127.0.0.1:{ready[1]}"
        threading.Thread(target=lambda lines: [None for _ in lines], args=[self.process.stderr], daemon=True).start()

    def ask(self, path: str, body: Any = None, *, method: str | None = None, kind: str = "application/json") -> Any:
        """Reply to a request: JSON, or its lines."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": kind}, method=method)
        with urllib.request.urlopen(request, timeout=300) as reply:
            text = reply.read().decode()
        return [json.loads(line) for line in text.splitlines()] if path.endswith("/content") else json.loads(text)

    def state(self) -> dict[str, int]:
        """Memory in bytes, descriptors and threads."""
        process = psutil.Process(self.process.pid)
        sizes = process.memory_full_info()
        return {"memory": sizes.uss, "descriptors": process.num_fds(), "threads": process.num_threads()}


class Day:
    """Rounds of a day, and what went wrong in them."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.draw, self.faults = folder, random.Random(seed), list[str]()
        self.texts, self.counts = dict[str, str](), Counter[str]()
        self.scale = 0.0
        rows = [self._rows(shape) for shape in ((4, 192), (192, 4))]
        pairs = {
            f"{MATRIX}.lora_{side}": (part, gguf.GGMLQuantizationType.F32)
            for side, part in zip("ab", rows, strict=True)
        }
        keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
        write_gguf(folder / "adapter.gguf", "llama", keys, pairs)
        self.write_presets(adapter=False)
        self.server = Server(folder)

    def _rows(self, shape: tuple[int, int]) -> np.ndarray:
        return np.random.default_rng(shape).normal(0, 0.5, shape).astype(np.float32)

    def write_presets(self, *, adapter: bool) -> None:
        """Write the presets, with the adapter or without it."""
        line = f"lora = {self.folder / 'adapter.gguf'}\n" if adapter else ""
        (self.folder / PRESETS).write_text(f"version = 1\n[{ADAPTED}]\nalias = adapted\n{line}")

    def adapt(self) -> None:
        """Add an adapter and set its scale, or remove it."""
        adapter = self.draw.random() < 0.7
        self.write_presets(adapter=adapter)
        self.server.ask("/models?reload=1")
        self.scale = self.draw.choice(SCALES) if adapter else 0.0
        found = self.server.ask(f"/lora-adapters?model={ADAPTED}")
        if len(found) != adapter:
            self.faults.append(f"{ADAPTED}: its adapters are {found}")
        elif adapter:
            self.server.ask(f"/lora-adapters?model={ADAPTED}", [{"id": 0, "scale": self.scale}])
        self.counts["adapters"] += adapter

    def round(self) -> None:
        """Clients beside a batch, an unload, an adapter, a replaced file."""
        self.adapt()
        batch = self.begin_batch()
        names = [self.draw.choice(MODELS) for _ in range(3 * CLIENTS)]
        numbers = [self.draw.randrange(8) for _ in names]
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(self.text, names, numbers))
        try:
            self.server.ask("/models/unload", {"model": self.draw.choice(MODELS)})
        except urllib.error.HTTPError as error:  # it is not loaded, or in use
            error.close()
        replaced = self.folder / "models" / f"{self.draw.choice(MODELS)}.gguf"
        shutil.copy(DEMO, replaced.with_suffix(".part"))
        replaced.with_suffix(".part").replace(replaced)
        self.server.ask("/models?reload=1")
        self.end_batch(batch)

    def text(self, model: str, number: int) -> None:
        """Ask for a text, and compare it with an equal one."""
        body = {
            "model": model,
            "prompt": f"Story {number}. " + "Once upon a time. " * 8,
            "seed": number,
            "max_tokens": 24,
        }
        for _ in range(60):
            try:
                text = self.server.ask("/v1/completions", body)["choices"][0]["text"]
                break
            except urllib.error.HTTPError as error:  # the models that are loaded are in use: wait
                error.close()
                self.counts[f"status {error.code}"] += 1
                if error.code != 503:
                    self.faults.append(f"{model}: status {error.code}")
                    return
                time.sleep(0.5)
        else:
            self.faults.append(f"{model}: no reply in 60 tries")
            return
        self.counts["texts"] += 1
        scale = self.scale if model == ADAPTED else 0.0
        if self.texts.setdefault(f"{number}/{scale}", text) != text:
            self.faults.append(f"{model}: equal requests have different texts, scale {scale}")

    def begin_batch(self) -> str:
        """Begin a batch of LINES lines; its id."""
        model = self.draw.choice(MODELS)
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions",
             "body": {"model": model, "prompt": "Once upon a time", "seed": i, "max_tokens": 16}}
            for i in range(LINES)
        ]  # fmt: skip
        content = "\n".join(map(json.dumps, lines))
        form = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
        file = f'Content-Disposition: form-data; name="file"; filename="b.jsonl"\r\n\r\n{content}'
        body = f"--edge\r\n{form}\r\n--edge\r\n{file}\r\n--edge--\r\n".encode()
        stored = self.server.ask("/v1/files", body, kind="multipart/form-data; boundary=edge")
        wanted = {"input_file_id": stored["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(self.server.ask("/v1/batches", wanted)["id"])

    def end_batch(self, batch: str) -> None:
        """Wait for a batch, check its lines, and delete its files."""
        for _ in range(600):
            found = self.server.ask(f"/v1/batches/{batch}")
            if found["status"] in ("completed", "failed", "cancelled", "expired"):
                break
            time.sleep(0.2)
        if found["status"] != "completed" or not found.get("output_file_id"):
            self.faults.append(f"a batch is {found['status']}: {found['request_counts']}")
        else:
            ids = sorted(
                int(line["custom_id"]) for line in self.server.ask(f"/v1/files/{found['output_file_id']}/content")
            )
            if ids != [*range(LINES)]:
                failed = found.get("error_file_id")
                errors = self.server.ask(f"/v1/files/{failed}/content") if failed else []
                self.faults.append(f"a batch has the lines {ids}, {found['request_counts']}: {errors}")
            self.counts["batches"] += 1
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if found.get(name):
                self.server.ask(f"/v1/files/{found[name]}", method="DELETE")

    def restart(self, *, kill: bool) -> None:
        """Restart the server while a batch runs."""
        batch = self.begin_batch()
        (self.server.process.kill if kill else self.server.process.terminate)()
        self.server.process.wait(120)
        self.server = Server(self.folder)
        self.end_batch(batch)
        self.counts["kills" if kill else "restarts"] += 1

    def life(self) -> None:
        """Rounds of a server, whose state must stay as it was."""
        for _ in range(WARM):
            self.round()
        before = self.server.state()
        for _ in range(LIFE - WARM):
            self.round()
        after = self.server.state()
        print(f"{dict(self.counts)}; {before} -> {after}", flush=True)
        room = {"memory": GROWTH, "descriptors": 8, "threads": 4}
        self.faults += [
            f"{name} grow: {before[name]} -> {after[name]}" for name in room if after[name] > before[name] + room[name]
        ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    ends = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        for model in MODELS:
            shutil.copy(DEMO, folder / "models" / f"{model}.gguf")
        day = Day(folder, given.seed)
        try:
            while not day.faults:
                day.life()
                if time.monotonic() > ends:
                    break
                day.restart(kill=day.draw.random() < 0.7)
        finally:
            day.server.process.terminate()
            day.server.process.wait(120)
        pairs = [(text, day.texts.get(f"{key[:-4]}/0.0")) for key, text in day.texts.items() if key.endswith("/1.0")]
        if pairs and all(text == plain for text, plain in pairs):
            day.faults.append("the adapter changes no text")
        size = sum(path.stat().st_size for part in ("data", "prompts") for path in (folder / part).rglob("*"))
        if size > DISK:
            day.faults.append(f"the folders of the store and of prompts have {size} bytes")
    print("\n".join(day.faults) or f"no fault; {size} bytes on disk")
    raise SystemExit(bool(day.faults))


if __name__ == "__main__":
    main()
