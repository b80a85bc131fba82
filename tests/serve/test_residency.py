"""Memory of loaded models, their eviction, states and events."""

import concurrent.futures
import contextlib
import math
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from demo_copies import write_demo_variants
from http_server import HttpReply, Served, served, wait_for
from llamacli.cli.model_sources import folder_sources
from llamacli.hub.demo import demo_path
from llamacli.serve import residency
from llamacli.serve.engine import LocalEngine
from llamacli.serve.errors import ModelTooLargeError
from llamacli.serve.models import Entry, ModelSource, weight_bytes
from llamacli.serve.settings import EngineSettings

KV, PROMPT = 4 << 20, "Once upon a time"


def entry(name: str, n_bytes: int = 100, **fields: Any) -> Entry:
    """A loaded model, without weights."""

    pinned = fields.pop("pinned", False)
    found = Entry(ModelSource(name, Path("none.gguf"), pinned=pinned))
    found.loaded = SimpleNamespace(n_bytes=n_bytes, scheduler=SimpleNamespace(busy=False))  # type: ignore[assignment]
    for field, value in fields.items():
        setattr(found, field, value)
    return found


def unloaded(name: str) -> Entry:
    return Entry(ModelSource(name, demo_path()))


def test_weights_are_those_of_all_files(tmp_path: Path) -> None:
    for number, size in ((1, 10), (2, 20), (3, 30)):
        (tmp_path / f"big-{number:05}-of-00003.gguf").write_bytes(b"x" * size)
    (tmp_path / "lora.gguf").write_bytes(b"x" * 7)
    first = tmp_path / "big-00001-of-00003.gguf"
    assert weight_bytes(ModelSource("a", first, adapters=((tmp_path / "lora.gguf", 1.0),))) == 67
    assert weight_bytes(ModelSource("a", tmp_path / "lora.gguf", draft=tmp_path / "gone.gguf")) == 7


def test_model_larger_than_the_memory_is_refused_with_the_numbers() -> None:
    size = demo_path().stat().st_size
    settings = EngineSettings(models_memory=size + 100, kv_memory=100)
    residency.expect_fit(unloaded("a"), [], settings)
    with pytest.raises(ModelTooLargeError, match=rf"'a' needs {size + 200} bytes, {size} of them .* has {size + 100} "):
        residency.expect_fit(unloaded("a"), [], EngineSettings(models_memory=size + 100, kv_memory=200))
    with pytest.raises(ModelTooLargeError, match="of which 1 are those of pinned models"):
        residency.expect_fit(unloaded("a"), [entry("b", 1, pinned=True)], settings)
    residency.expect_fit(unloaded("a"), [entry("b", 1)], settings)
    with pytest.raises(ModelTooLargeError, match="all 1 models"):
        residency.expect_fit(unloaded("a"), [entry("b", pinned=True)], EngineSettings(models_max=1))


def test_room_is_that_of_bytes_and_of_a_number() -> None:
    size = demo_path().stat().st_size
    settings = EngineSettings(models_memory=size + 300, kv_memory=100)
    assert residency.has_room(unloaded("a"), [entry("b", 200)], settings)
    assert not residency.has_room(unloaded("a"), [entry("b", 201)], settings)
    assert residency.has_room(unloaded("a"), [entry("b")], EngineSettings())
    assert not residency.has_room(unloaded("a"), [entry("b")], EngineSettings(models_max=1))


def test_least_recently_used_is_neither_in_use_nor_pinned() -> None:
    models = [entry("used", touched_at=1, n_pins=1), entry("pinned", touched_at=2, pinned=True)]
    assert residency.least_recently_used(models) is None
    old, new = entry("old", touched_at=3), entry("new", touched_at=4)
    assert residency.least_recently_used([*models, new, old]) is old


def test_long_wait_makes_the_oldest_load_give_way() -> None:
    first, second = entry("first", loaded_at=1), entry("second", loaded_at=2)
    pinned, waiting = entry("pinned", loaded_at=0, pinned=True), unloaded("waiting")
    models = [second, first, pinned, waiting]
    waiting.waits_since, waiting.touched_at = 10.0, 16.0
    assert [one.source.name for one in models if residency.gives_way(one, models, 16.1)] == ["first"]
    assert not residency.gives_way(first, models, 14.9)
    assert not residency.gives_way(first, models, 17.1)  # nobody asks any more


# --- twenty models, memory for five


def oracle(names: Sequence[str], n: int) -> int:
    """Loads of Belady's algorithm: what is needed last gives way."""
    held: set[str] = set()
    loads = 0
    for i, name in enumerate(names):
        if name in held:
            continue
        loads += 1
        if len(held) == n:
            later = {one: next((j for j in range(i, len(names)) if names[j] == one), len(names)) for one in held}
            held.remove(max(later, key=lambda one: later[one]))
        held.add(name)
    return loads


def test_oracle() -> None:
    assert oracle("abcabc", 3) == 3
    assert oracle("abcdabeabcde", 3) == 7  # Belady's own example


@pytest.fixture
def many(tmp_path: Path) -> Iterator[tuple[Served, LocalEngine]]:
    """Twenty models, with memory for five."""
    paths = write_demo_variants(tmp_path, 20)
    memory = 5 * (paths[0].stat().st_size + KV)
    settings = EngineSettings(threads=1, models_memory=memory, kv_memory=KV, n_ctx=512)
    engine = LocalEngine(folder_sources(tmp_path), settings)
    with served(engine, sources=lambda: folder_sources(tmp_path)) as server:
        yield server, engine


def complete(server: Served, name: str, seed: int) -> HttpReply:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 16, "seed": seed, "temperature": 0.9}
    return server.send("/v1/completions", body)


@pytest.mark.slow
def test_random_models_have_few_loads_and_their_own_texts(many: tuple[Served, LocalEngine]) -> None:
    server, engine = many
    chance = random.Random(1)
    wanted = [(f"model-{chance.randrange(20):02}", i % 7) for i in range(200)]
    order, lock = iter(wanted), threading.Lock()
    asked: list[tuple[str, int]] = []
    most = 0

    def client(_: int) -> list[tuple[tuple[str, int], HttpReply]]:
        nonlocal most
        found = []
        while True:
            with lock:
                one = next(order, None)
                if one is None:
                    return found
                asked.append(one)
            found.append((one, complete(server, *one)))
            most = max(most, sum(info.loaded for info in engine.models()))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        replies = [pair for pairs in pool.map(client, range(16)) for pair in pairs]
    loads = sum(one.loads for one in engine.stats().loads.values())
    assert [reply.status for _, reply in replies] == [200] * 200
    assert most == 5
    assert loads <= 1.3 * oracle([name for name, _ in asked], 5)
    texts = {one: complete(server, *one).json["choices"][0]["text"] for one in sorted(set(wanted))}
    assert len(set(texts.values())) > 60
    assert {one: reply.json["choices"][0]["text"] for one, reply in replies} == texts
    status = Path("/proc/self/status").read_text()
    assert "VmSwap:\t       0 kB" in status


@pytest.mark.slow
def test_busy_models_do_not_keep_others_out(many: tuple[Served, LocalEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    server, engine = many
    monkeypatch.setattr(residency, "PATIENCE_S", 0.5)
    stop = threading.Event()

    def use(name: str) -> None:
        while not stop.is_set():
            assert complete(server, name, 1).status == 200

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        users = [pool.submit(use, f"model-{i % 5:02}") for i in range(10)]
        wait_for(lambda: sum(info.loaded for info in engine.models()) == 5)
        assert complete(server, "model-19", 1).status == 200
        stop.set()
        for user in users:
            user.result()


@pytest.mark.medium
def test_folder_is_read_again_and_failures_are_told(tmp_path: Path) -> None:
    first, second = write_demo_variants(tmp_path, 2)
    (tmp_path / "broken.gguf").write_bytes(first.read_bytes()[:100_000])
    engine = LocalEngine(folder_sources(tmp_path), EngineSettings(threads=1, n_ctx=512))
    with served(engine, sources=lambda: folder_sources(tmp_path)) as server:
        listed = {one["id"]: one for one in server.send("/v1/models").json["data"]}
        assert [*listed] == ["broken", "model-00", "model-01"]
        assert all(one["status"] == {"value": "unloaded"} for one in listed.values())
        failed = complete(server, "broken", 1)
        assert failed.status == 500
        assert "cannot be loaded: broken.gguf: " in failed.json["error"]["message"]
        assert str(tmp_path) not in failed.json["error"]["message"]
        status = server.send("/v1/models/broken").json["status"]
        assert (status["value"], status["failed"]) == ("unloaded", True)
        assert "broken.gguf" in status["error"]
        text = complete(server, "model-00", 1).json["choices"][0]["text"]
        other = complete(server, "model-01", 1).json["choices"][0]["text"]
        assert text != other
        replaced = tmp_path / "new.gguf"
        replaced.write_bytes(second.read_bytes())
        replaced.replace(first)  # it is served on until the list is read again
        second.unlink()
        assert complete(server, "model-00", 1).json["choices"][0]["text"] == text
        names = [one["id"] for one in server.send("/models?reload=1").json["data"]]
        assert names == ["broken", "model-00"]
        assert complete(server, "model-00", 1).json["choices"][0]["text"] == other
        assert complete(server, "model-01", 1).status == 404
        metrics = server.send("/metrics").body.decode()
        assert 'llamacli_model_load_failures_total{model="broken"} 1.0' in metrics
        first.unlink()
        server.send("/models/unload", {"model": "model-00"})
        wait_for(lambda: server.send("/v1/models/model-00").json["status"]["value"] == "unloaded")
        gone = complete(server, "model-00", 1)
        assert (gone.status, gone.json["error"]["code"]) == (500, None)
        assert "model-00.gguf" in gone.json["error"]["message"]


@pytest.mark.medium
def test_events_and_keep_alive(tmp_path: Path) -> None:
    write_demo_variants(tmp_path, 1)
    engine = LocalEngine(folder_sources(tmp_path), EngineSettings(threads=1, n_ctx=512))
    with served(engine) as server, contextlib.closing(server.connect()) as connection:
        connection.request("GET", "/models/sse")
        response = connection.getresponse()
        body = {"model": "model-00", "prompt": PROMPT, "options": {"num_predict": 2}, "stream": False}
        assert server.send("/api/generate", {**body, "keep_alive": "soon"}).status == 400
        assert server.send("/api/generate", {**body, "keep_alive": "300ms"}).status == 200
        seen = b""
        while b"sleeping" not in seen:
            seen += response.readline()
        assert b'{"model":"model-00","event":"model_status","data":{"value":"unloaded","status":"unloaded"}}' in seen
        assert b'"status":"loaded"' in seen
        assert server.send("/api/generate", {**body, "keep_alive": -1}).status == 200
        assert engine._entries["model-00"].idle_limit(0.1) == math.inf
