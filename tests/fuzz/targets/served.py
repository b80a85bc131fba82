"""Bodies of requests, batches, catalogues, presets, frames, cached prompts."""

import asyncio
import base64
import contextlib
import io
import json
import math
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

import tiny_variants
from fuzz.mutations import Edit, edited, edits
from fuzz.target import Target
from fuzz.targets.states import FORGERIES, forged_fields
from llamacli import load_model
from llamacli.cli.model_sources import preset_sources
from llamacli.engine.stages import SPAN
from llamacli.inputs import Inputs
from llamacli.kv.prefixes import PrefixIndex
from llamacli.kv.prompt_cache import PromptCache
from llamacli.plugins import Plugins
from llamacli.serve.catalogue import Catalogue, Manifest, parse_modelfile
from llamacli.serve.http.anthropic import MessagesRequest, as_chat
from llamacli.serve.http.batches import parse_line, split_lines
from llamacli.serve.http.bodies import convert, parse
from llamacli.serve.http.constraints import schema_of
from llamacli.serve.http.llamacpp import InfillRequest, NativeEmbeddings, NativeRequest
from llamacli.serve.http.prompt_embeds import _array
from llamacli.serve.http.schemas.chat import ChatRequest
from llamacli.serve.http.schemas.completions import CompletionRequest
from llamacli.serve.store import FILE_NAME, Store
from llamacli.stages.frames import _parsed
from llamacli.stages.messages import batch_of
from llamacli.tools import mcp
from llamacli.tools.mcp import read_servers
from paths import entry_points

_KINDS = ("bit", "byte", "cut", "drop", "repeat")
_EDITS = st.one_of(st.just([]), st.just([]), edits(_KINDS, 3))
_PICTURE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
_CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
_TEXTS = {"max_tokens": 5, "temperature": 0.5, "stop": ["a"], "seed": 3, "logit_bias": {"5": 1.0}, "n_probs": 2}
BODIES: dict[str, tuple[type, dict[str, Any]]] = {
    "messages": (
        MessagesRequest,
        {
            "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "a"}], "stop_sequences": ["x"],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image", "source": _PICTURE}]},
                {"role": "assistant", "content": [_CALL]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "5"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
    "native": (NativeRequest, {**_TEXTS, "prompt": ["a", [1, 2]], "grammar": 'root ::= "a"', "samplers": ["top_k"]}),
    "infill": (InfillRequest, {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}]}),
    "embedding": (NativeEmbeddings, {"content": ["a", [1, 2]], "embd_normalize": 2}),
    "chat": (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}),
    "completion": (CompletionRequest, {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 2, "n": 2}),
}  # fmt: skip
"""Type and a whole body of each kind, which is mutated."""


def _read_body(case: tuple[str, list[tuple[int, Any]], list[Edit]]) -> None:
    name, forgeries, changes = case
    kind, body = BODIES[name]
    request = convert(parse(edited(json.dumps(forged_fields(body, forgeries)).encode(), changes)), kind)
    if isinstance(request, MessagesRequest):
        request = as_chat(request)
    if isinstance(request, ChatRequest | CompletionRequest):
        schema_of(request)


REQUESTS = Target(
    cases=st.tuples(st.sampled_from(sorted(BODIES)), FORGERIES, _EDITS),
    start=lambda folder: _read_body,
    per_process=50_000,
)
"""Bodies of Anthropic's, llama.cpp's and OpenAI's APIs, up to what is computed."""


def _read_batch(case: tuple[list[tuple[str, list[tuple[int, Any]]]], list[Edit], int]) -> None:
    lines, changes, size = case
    written = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": BODIES[name][1]}
        for name, _ in lines
    ]
    forged = (json.dumps(forged_fields(line, more)) for line, (_, more) in zip(written, lines, strict=True))
    data = edited("\n".join(forged).encode(), changes)
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    found = [*split_lines(parts, 1000)]
    lines_of = data.split(b"\n")
    assert found == [line[:1001] for line in (lines_of if lines_of[-1] else lines_of[:-1])]
    for i, line in enumerate(found):
        parse_line(i + 1, line, None, 1000)


BATCHES = Target(
    cases=st.tuples(
        st.lists(st.tuples(st.sampled_from(sorted(BODIES)), FORGERIES), min_size=1, max_size=4),
        _EDITS,
        st.integers(1, 900),
    ),
    start=lambda folder: _read_batch,
    per_process=50_000,
)
"""Files of batches, that come in parts of any size."""

_MODELFILE = 'FROM model.gguf\nSYSTEM """Be\nbrief."""\nPARAMETER temperature 0.5\nPARAMETER stop "x"\nADAPTER a.gguf\n'
_PRESETS = "[m]\nmodel = model.gguf\nctx-size = 64\ntemp = 0.5\n\n[other]\nmodel = model.gguf\nn-predict = 5\n"


def _start_catalogue(folder: Path) -> Callable[[tuple[str, list[tuple[int, Any]], list[Edit]]], None]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    catalogue, presets = Catalogue(folder / "catalogue"), folder / "presets.ini"
    tiny_variants.write(folder / "model.gguf", "gqa")
    with catalogue.new_blob() as blob:
        blob.path.write_bytes(b"model")
    catalogue.write("m", Manifest([catalogue.relative(blob.path)]))
    (manifest,) = (catalogue.folder / "manifests").iterdir()
    fields = json.loads(manifest.read_bytes())

    def read(case: tuple[str, list[tuple[int, Any]], list[Edit]]) -> None:
        kind, forgeries, changes = case
        if kind == "manifest":
            manifest.write_bytes(edited(json.dumps(forged_fields(fields, forgeries)).encode(), changes))
            for path in catalogue.read("m").files:
                assert (catalogue.folder / path).resolve().is_relative_to(catalogue.folder.resolve())
        elif kind == "Modelfile":
            parse_modelfile(edited(_MODELFILE.encode(), changes).decode(errors="replace"))
        else:
            presets.write_bytes(edited(_PRESETS.encode(), changes))
            preset_sources(presets, {})

    return read


CATALOGUES = Target(
    cases=st.tuples(
        st.sampled_from(["manifest", "Modelfile", "presets"]),
        FORGERIES,
        edits(_KINDS, 4),
    ),
    start=_start_catalogue,
    per_process=20_000,
)
"""Manifests of the catalogue, Modelfiles, presets of models."""

_SHAPES = [[1, 5], [1], [1, len(SPAN.names or ())], [1], [1, 2], [1, 2], [1, 3], [1, 2], [1, 8]]
_DTYPES = ["<i8", "<i4", "<i8", "<i8", "<i8", "<i4", "<i8", "<i8", "<f4"]
_ARRAYS = [[dtype, shape] for dtype, shape in zip(_DTYPES, _SHAPES, strict=True)]
_N_BODY = sum(int(dtype[2]) * math.prod(shape) for dtype, shape in zip(_DTYPES, _SHAPES, strict=True))


def _read_frame(case: tuple[list[tuple[int, Any]], list[Edit], int]) -> None:
    forgeries, changes, n_body = case
    fields = {"kind": "batch", "arrays": _ARRAYS, "number": 3, "k": "f16", "v": "f16", "result": "logits"}
    frame = _parsed(edited(json.dumps(forged_fields(fields, forgeries)).encode(), changes), bytearray(n_body))
    assert sum(array.nbytes for array in frame.arrays) == n_body
    batch_of(frame)


FRAMES = Target(
    cases=st.tuples(FORGERIES, _EDITS, st.one_of(st.just(_N_BODY), st.integers(0, 300))),
    start=lambda folder: _read_frame,
    per_process=50_000,
)
"""Frames of workers of a pipeline, behind their authentication."""


def _start_prompts(folder: Path) -> Callable[[list[Edit]], None]:
    model = load_model(tiny_variants.write(folder / "m.gguf", "gqa"), threads=1, plugins=Plugins(entry_points()))
    tokens, pool, most = [3 + i % 90 for i in range(120)], model.kv_pool(), 1 << 30
    kept = PrefixIndex(pool)
    with model.create_session(reuse=False) as session:
        session.eval(tokens)
        kept.keep(session.cache, most)
    PromptCache(folder / "prompts", most).save(kept)
    (file,) = (folder / "prompts").iterdir()
    whole = file.read_bytes()

    def load(changes: list[Edit]) -> None:
        file.write_bytes(edited(whole, changes))
        index = PrefixIndex(pool)
        with model.create_session(reuse=False) as session:
            n = PromptCache(folder / "prompts", most).load(index, session.cache, tokens, most)
            assert n == (len(tokens) if file.is_file() and file.read_bytes() == whole else 0)
        index.clear()

    load([])
    return load


PROMPTS = Target(cases=edits(_KINDS, 3), start=_start_prompts)
"""Files of the cache of prompts on disk: damaged ones are deleted, and nothing of them is taken."""

_ROWS = np.arange(24, dtype=np.float32).reshape(3, 8)


def _npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, _ROWS)
    return buffer.getvalue()


def _read_rows(case: tuple[str, list[tuple[int, Any]], list[Edit]]) -> None:
    kind, forgeries, changes = case
    if kind == "npy":
        data = edited(_npy(), changes)
    else:
        fields = {"rows": {"dtype": "F32", "shape": list(_ROWS.shape), "data_offsets": [0, _ROWS.nbytes]}}
        header = json.dumps(forged_fields(fields, forgeries)).encode()
        data = edited(len(header).to_bytes(8, "little") + header + _ROWS.tobytes(), changes)
    inputs = Inputs.of(embeddings=_array(base64.b64encode(data).decode()))
    assert inputs.embeddings is None or inputs.embeddings.nbytes <= 2 * len(data)


EMBEDDINGS = Target(
    cases=st.tuples(st.sampled_from(["npy", "safetensors"]), FORGERIES, _EDITS),
    start=lambda folder: _read_rows,
    per_process=50_000,
)
"""Prompts of embeddings, as files in requests."""

_SERVERS = {
    "mcpServers": {
        "files": {"command": "x", "args": ["a"], "env": {"K": "v"}, "cwd": "/tmp", "timeout": 5},
        "web": {"url": "http://localhost/mcp", "headers": {"A": "b"}, "disabled": True},
    }
}


def _start_servers(folder: Path) -> Callable[[tuple[list[tuple[int, Any]], list[Edit]]], None]:
    path = folder / "mcp.json"

    def read(case: tuple[list[tuple[int, Any]], list[Edit]]) -> None:
        path.write_bytes(edited(json.dumps(forged_fields(_SERVERS, case[0])).encode(), case[1]))
        for server in read_servers(path):
            assert server.name

    return read


SERVERS = Target(cases=st.tuples(FORGERIES, _EDITS), start=_start_servers, per_process=20_000)
"""Files of MCP servers."""

_TOOL = {"name": "f", "description": "d", "inputSchema": {"type": "object", "properties": {"x": {"type": "string"}}}}
_TEXT = {"type": "text", "text": "a", "annotations": {"audience": ["user"], "priority": 0.5}}
_FILE = {"type": "resource", "resource": {"uri": "file:///a", "mimeType": "text/plain", "text": "b"}}
_IMAGE = {"type": "image", "mimeType": "image/png", "data": "aGk="}
_RESULTS: dict[str, dict[str, Any]] = {
    "initialize": {
        "protocolVersion": "2024-11-05", "capabilities": {"tools": {"listChanged": True}},
        "serverInfo": {"name": "s", "version": "1"}, "instructions": "i",
    },
    "tools/list": {"tools": [_TOOL, {**_TOOL, "name": "g"}], "nextCursor": None},
    "tools/call": {"content": [_TEXT, _FILE, _IMAGE], "structuredContent": {"y": 1}, "isError": False},
}  # fmt: skip


class _Pipe:
    """Standard input of a server, whose answers are forged."""

    def __init__(self, process: mcp._Process, forgeries: list[tuple[int, Any]], changes: list[Edit]):
        self._process, self._forgeries, self._changes = process, forgeries, changes

    def get_pipe_transport(self, number: int) -> "_Pipe":
        return self

    def get_returncode(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        asked = json.loads(data)
        if "id" in asked:
            said = {"jsonrpc": "2.0", "id": asked["id"], "result": _RESULTS[asked["method"]]}
            line = json.dumps(forged_fields(said, self._forgeries)).encode()
            self._process.pipe_data_received(
                1, b'{"jsonrpc":"2.0","method":"x"}\n' + edited(line, self._changes) + b"\n"
            )
            self._process.process_exited() if asked["method"] == "tools/call" and self._changes else None


def _talk(case: tuple[list[tuple[int, Any]], list[Edit]]) -> None:
    @contextlib.asynccontextmanager
    async def process(server: mcp.McpServer, stopped: asyncio.Event) -> AsyncIterator[mcp._Process]:
        talking = mcp._Process(stopped)
        talking.connection_made(asyncio.SubprocessTransport())
        pipe: Any = _Pipe(talking, *case)
        talking._transport = pipe
        yield talking
        talking._send.close()

    async def talk() -> None:
        servers = mcp.McpServers([mcp.McpServer(name="s", command="x", timeout=0.05)])
        try:
            for tool in await servers.tools():
                assert len(tool.name) <= 64
                result = await servers.call(tool.name, {"x": "a"})
                assert [type(text) for text in result.values()] == [str]
                assert result.keys() <= {"plain_text_response", "error"}
        finally:
            await servers.close()

    mcp._process, mcp._BEGIN_S = process, 0.05  # type: ignore[assignment]
    asyncio.run(talk())


MESSAGES = Target(cases=st.tuples(FORGERIES, _EDITS), start=lambda folder: _talk, per_process=2000)
"""Messages of MCP servers: what is none is passed over, and tools give texts or errors."""


def _start_store(folder: Path) -> Callable[[list[Edit]], None]:
    base = folder / "data"
    path = base / FILE_NAME
    store = Store(base)
    for i in range(4):
        items = [{"id": f"item_{i}_{k}", "text": "a" * 50} for k in range(3)]
        store.add("response", "anna", {"id": f"resp_{i}", "text": "b" * 300}, private={"body": i}, items=items)
    store.add("batch", "anna", {"id": "batch_0"}, is_open=True)
    store.add("file", "anna", {"id": "file_0"})
    for i in range(3):
        store.add_chunk("file_0", i, b"c" * 500)
        store.add_result("batch_0", i, b"{}", failed=i == 1)
    store.close()
    whole = path.read_bytes()

    def use(changes: list[Edit]) -> None:
        for name in (f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"):
            (base / name).unlink(missing_ok=True)
        path.write_bytes(edited(whole, changes))
        store = Store(base)
        try:
            store.unfinished("batch")
            assert len(b"".join(store.chunks("file_0"))) <= len(whole)
            assert all(isinstance(line, bytes) for line in store.results("batch_0", failed=None))
            store.page("response", "anna", limit=3)
            store.page_of_items("resp_1", limit=2, after="item_1_0")
            store.lines_done("batch_0")
            store.add("response", "anna", {"id": "resp_5"}, items=[{"id": "item_5"}])
            for i in range(4):
                store.get("response", f"resp_{i}", "anna")
                store.items(f"resp_{i}")
            store.end_batch("anna", {"id": "batch_0"}, [(False, {"id": "file_1"})])
            store.remove("response", "resp_2", "anna")
            store.expire()
        finally:
            store.close()

    use([])
    return use


STORES = Target(cases=edits(_KINDS, 3), start=_start_store, per_process=2000)
"""Stored responses, files and batches, in a damaged file."""
