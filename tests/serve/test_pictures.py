"""Pictures and sound in the server: APIs, pieces, shared cells, refusals."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adapters import write_adapter
from http_server import Served, served, wait_for
from llamacli import Model, load_model
from llamacli.media.encoder import LoadedEncoder
from llamacli.media.pictures import Picture
from llamacli.plugins import Plugins
from llamacli.serve import planning
from llamacli.serve.engine import LocalEngine
from llamacli.serve.models import ModelSource
from llamacli.serve.scheduler import Scheduler
from llamacli.serve.settings import EngineSettings
from llamacli.testing.tiny_media import drawn, tone
from llamacli.tools.embedding import Pooling
from media_cases import CASES, write_mmproj, write_text
from sound_cases import CASES as HEARING
from sound_cases import wav, write_hearing
from suite import slow_but

pytestmark = pytest.mark.medium

ONE, OTHER = drawn(61, 33), np.full((33, 61, 3), 255, np.uint8)
N_NEW = 12
SEEING = ["idefics3", "gemma3", "qwen3vl"]
"""Plain, with spans that attend in both directions, with positions of several components."""
NAMES = [*SEEING, "qwen3a"]


def png(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def b64(pixels: np.ndarray) -> str:
    return base64.b64encode(png(pixels)).decode()


def uri(pixels: np.ndarray) -> str:
    return f"data:image/png;base64,{b64(pixels)}"


def media(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Two media of one size that an encoder reads."""
    return (tone(), tone(hertz=900)) if name in HEARING else (ONE, OTHER)


def user(*parts: str | np.ndarray) -> dict[str, Any]:
    """Message of texts, pictures and sounds, in OpenAI's form."""
    return {"role": "user", "content": [*map(_part, parts)]}


def _part(part: str | np.ndarray) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.ndim == 1:
        data = base64.b64encode(wav(part)).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": uri(part)}}


def write(folder: Path, name: str) -> Path:
    if name in HEARING:
        return write_hearing(folder, name)
    write_mmproj(folder / "mmproj-text.gguf", name)
    return write_text(folder / "text.gguf", name)


def load_case(name: str) -> Callable[..., Model]:
    case = (CASES | HEARING)[name]
    plugins = Plugins.of(case.text, media=[case.encoder])

    def load(path: Path, mode: str, **options: Any) -> Model:
        return load_model(path, mode, plugins=plugins, **options)

    return load


@contextlib.contextmanager
def start(folder: Path, name: str = "idefics3", adapters: Any = (), **settings: Any) -> Iterator[LocalEngine]:
    path = folder / "text.gguf"
    if not path.exists():
        write(folder, name)
    given = EngineSettings(**{"threads": 1, "n_ctx": 512, "mode": "fp32", **settings})
    engine = LocalEngine((ModelSource("tiny", path, adapters=adapters),), given, load_case(name))
    try:
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def serving(
    folder: Path, name: str = "idefics3", http: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Served]:
    with start(folder, name, **settings) as engine, served(engine, template=None, **(http or {})) as server:
        yield server


def chat(server: Served, *messages: dict[str, Any], **fields: Any) -> Any:
    body = {"messages": list(messages), "max_tokens": N_NEW, "temperature": 0, **fields}
    reply = server.send("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    return reply.json


def text_of(answer: Any) -> str:
    """ASCII of a reply: random models draw broken characters."""
    text: str = answer["choices"][0]["message"]["content"]
    return text.encode("ascii", "ignore").decode()


def alone(folder: Path, name: str, text: str, *pictures: np.ndarray) -> str:
    """Reply of the library."""
    with load_case(name)(folder / "text.gguf", "fp32", threads=1) as model:
        return text_of(model.create_chat_completion([user(*pictures, text)], max_tokens=N_NEW, temperature=0.0))


@pytest.mark.parametrize("name", NAMES)
def test_replies_are_those_of_a_session(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = media(name)
    write(tmp_path, name)
    expected = [alone(tmp_path, name, "What?", picture) for picture in (one, other)]
    monkeypatch.setattr("llamacli.engine.native._PIECE_WORK", 1e5)
    for settings in ({}, {"step_ms": 0.1}, {"step_ms": 0.0}, {"lookup": True}, {"max_running": 1}):
        with serving(tmp_path, name, **settings) as server, ThreadPoolExecutor(2) as pool:
            both = [*pool.map(lambda medium: text_of(chat(server, user(medium, "What?"))), (one, other))]
        assert both == expected, settings
    assert expected[0] != expected[1] or name not in SEEING  # tiny models write the same of all sounds


def test_every_api_shows_the_same_picture(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        whole = chat(server, user(ONE, "What?"))["choices"][0]["message"]["content"]
        given = {"model": "tiny", "options": {"temperature": 0, "num_predict": N_NEW}, "stream": False}
        message = {"role": "user", "content": "What?", "images": [b64(ONE)]}
        assert server.send("/api/chat", {"messages": [message], **given}).json["message"]["content"] == whole
        generated = server.send("/api/generate", {"prompt": "What?", "images": [b64(ONE)], **given}).json
        assert generated["response"] == whole
        parts = [{"type": "input_image", "image_url": uri(ONE)}, {"type": "input_text", "text": "What?"}]
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": N_NEW, "temperature": 0}
        answer = server.send("/v1/responses", body).json
        assert answer["output"][0]["content"][0]["text"] == whole
        source = {"type": "base64", "media_type": "image/png", "data": b64(ONE)}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
        body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": N_NEW, "temperature": 0}
        reply = server.send("/v1/messages", body).json
        assert reply["content"][0]["text"] == whole
        counted = server.send("/v1/messages/count_tokens", {"messages": body["messages"]}).json["input_tokens"]
        assert counted == reply["usage"]["input_tokens"] + reply["usage"].get("cache_read_input_tokens", 0)


def test_prompts_with_pictures(tmp_path: Path) -> None:
    """llama-server's form: a marker in the text for each picture."""
    with serving(tmp_path) as server:
        whole = chat(server, user(ONE, "What?"))["choices"][0]["message"]["content"]

        def completed(text: str, *pictures: str, path: str = "/completion", **fields: Any) -> Any:
            prompt = {"prompt_string": text, "multimodal_data": list(pictures)}
            return server.send(path, {"prompt": prompt, "n_predict": N_NEW, "temperature": 0, **fields})

        text = "<bos><__media__>What?<eos><bos>"
        reply = completed(text, b64(ONE)).json
        assert reply["content"] == whole
        assert reply["timings"]["cache_n"] == reply["tokens_evaluated"] - 1
        assert completed(text, b64(OTHER)).json["content"] != whole
        assert completed(text, b64(ONE), path="/v1/completions", parse_special=True).json["choices"][0]["text"] == whole
        one = {"prompt_string": text, "multimodal_data": [b64(ONE)]}
        for wrong, param in [
            (completed("What?", b64(ONE)), "prompt"),
            (completed(text, b64(ONE), b64(ONE)), "prompt"),
            (completed(text, "malformed"), "prompt.multimodal_data[0]"),
            (completed(text, b64(ONE), path="/v1/completions", suffix="x"), "suffix"),
            (server.send("/completion", {"prompt": [one]}), "prompt"),
        ]:
            assert (wrong.status, wrong.json["error"]["param"]) == (400, param)
    (tmp_path / "mmproj-text.gguf").unlink()
    with serving(tmp_path) as server:
        prompt = {"prompt_string": text, "multimodal_data": [b64(ONE)]}
        reply = server.send("/completion", {"prompt": prompt})
        assert (reply.status, reply.json["error"]["code"]) == (400, "unsupported_content")


@pytest.mark.parametrize("name", SEEING)
def test_vectors_of_pictures(tmp_path: Path, name: str) -> None:
    """Vectors of texts with pictures, in both forms and beside texts."""
    with serving(tmp_path, name, step_ms=0.1) as server:
        marked = {"prompt_string": "What: <__media__>?", "multimodal_data": [b64(ONE)]}
        parts = {"content": user("What: ", ONE, "?")["content"]}
        inputs = [marked, "What: ?", parts, {**marked, "multimodal_data": [b64(OTHER)]}, [1, 2]]
        reply = server.send("/v1/embeddings", {"input": inputs}).json
        first, text, second, other, _ = (one["embedding"] for one in reply["data"])
        assert first == second != other
        assert first != text == server.send("/v1/embeddings", {"input": "What: ?"}).json["data"][0]["embedding"]
        assert server.send("/embedding", {"content": marked}).json[0]["embedding"] == [first]
        n_tokens = server.send("/v1/embeddings", {"input": marked}).json["usage"]["prompt_tokens"]
        for wrong, param in [({"input": [1, marked]}, "input"), ({"input": {**marked, "prompt_string": "x"}}, "input"),
                             ({"input": ["a", {**marked, "multimodal_data": ["x"]}]}, "input[1].multimodal_data[0]"),
                             ({"input": {**parts, **marked}}, "input"), ({"input": [marked] * 65}, "input"),
                             ({"input": marked, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens")]:  # fmt: skip
            refused = server.send("/v1/embeddings", wrong)
            assert (refused.status, refused.json["error"]["param"]) == (400, param)
    with serving(tmp_path, name, pooling=Pooling.NONE) as server:
        rows, alone = (
            np.array(server.send("/embedding", {"content": one}).json[0]["embedding"]) for one in (marked, "What:")
        )
        assert len(rows) == n_tokens
        assert rows[: len(alone)].tolist() == alone.tolist(), "tokens before a picture do not see it"


def test_files_of_a_folder_only(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    (shown / "in").mkdir(parents=True)
    (shown / "in" / "a b.png").write_bytes(png(ONE))
    (tmp_path / "secret.png").write_bytes(png(ONE))
    (shown / "link.png").symlink_to(tmp_path / "secret.png")
    (shown / "circle.png").symlink_to(shown / "circle.png")

    def asked(server: Served, name: str) -> Any:
        parts = [{"type": "image_url", "image_url": {"url": f"file://{name}"}}, {"type": "text", "text": "What?"}]
        return server.send("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})

    with serving(tmp_path, http={"media_path": shown}) as server:
        assert asked(server, "in/a b.png").status == 200
        assert asked(server, "//in//a b.png").status == 200
        for name in (
            "../secret.png",
            "link.png",
            "circle.png",
            "in",
            "",
            "none.png",
            "a\0b",
            str(tmp_path / "secret.png"),
        ):
            reply = asked(server, name)
            assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_image"), name
    with serving(tmp_path) as server:
        assert asked(server, "in/a b.png").json["error"]["code"] == "unsupported_content"


def test_capabilities(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert "vision" in server.send("/api/show", {"model": "tiny"}).json["capabilities"]
        sizes = [(tmp_path / name).stat().st_size for name in ("text.gguf", "mmproj-text.gguf")]
        assert server.send("/api/ps").json["models"][0]["size"] == sum(sizes)
        print_of = chat(server, user("x"))["system_fingerprint"]
        assert server.send("/props").json["modalities"] == {"vision": True, "audio": False}
        (one,) = server.send("/v1/models").json["data"]
        assert one["architecture"]["input_modalities"] == ["text", "image"]
        assert server.send("/models").json["models"][0]["capabilities"] == ["completion", "multimodal"]
    (tmp_path / "mmproj-text.gguf").unlink()
    with serving(tmp_path) as server:
        assert "vision" not in server.send("/api/show", {"model": "tiny"}).json["capabilities"]
        assert server.send("/props").json["modalities"]["vision"] is False
        assert server.send("/api/ps").json["models"][0]["size"] == sizes[0]
        assert chat(server, user("x"))["system_fingerprint"] != print_of
        reply = server.send("/v1/chat/completions", {"messages": [user(ONE)]})
        assert (reply.status, reply.json["error"]["code"]) == (400, "unsupported_content")


def test_the_same_picture_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[bytes] = []
    original = LoadedEncoder._encoded

    def counted(self: LoadedEncoder, tile: Any) -> Any:
        encoded.append(tile.key)
        return original(self, tile)

    monkeypatch.setattr(LoadedEncoder, "_encoded", counted)
    with serving(tmp_path) as server:
        first = chat(server, user(ONE, "What?"))
        n = len(encoded)
        again = chat(server, user(ONE, "What?"))
        assert (n > 1, len(encoded)) == (True, n)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
        other = chat(server, user(OTHER, "What?"))
        assert other["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"], "of equal size"
        assert text_of(other) != text_of(first) == text_of(again)
        n = len(encoded)
        later = chat(server, user("Look:", ONE, "What?"))
        assert later["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
        assert len(encoded) == n, "rows are kept behind another text too"


def test_streams_go_on_while_a_picture_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tokens of a stream there is a piece."""
    monkeypatch.setattr("llamacli.engine.native._PIECE_WORK", 1e4)
    with start(tmp_path, step_ms=0.01, n_ctx=1024) as engine, served(engine, template=None) as server:
        chat(server, user("warm"))
        loaded = next(entry.loaded for entry in engine._entries.values())
        assert loaded is not None
        scheduler, seen = loaded.scheduler, []
        step = scheduler.step

        def counted() -> Any:
            pieces, running = scheduler.pictures.n_pieces, [one for one in scheduler.running if one.decodes]
            before = {id(one): len(one.context) for one in running}
            events = step()
            if scheduler.pictures.n_pieces > pieces:
                grown = [len(one.context) - before[id(one)] for one in running if one in scheduler.running.sequences]
                seen.append((scheduler.pictures.n_pieces - pieces, grown))
            return events

        monkeypatch.setattr(scheduler, "step", counted)
        text = threading.Thread(
            target=chat, args=(server, user("tell")), kwargs={"max_tokens": 900, "ignore_eos": True}
        )
        text.start()
        wait_for(lambda: any(one.decodes for one in scheduler.running))
        chat(server, user(ONE, "What?"))
        text.join()
    beside = [(pieces, grown) for pieces, grown in seen if grown]
    assert len(beside) > 10
    assert all(pieces == 1 and grown == [1] for pieces, grown in beside)


def test_a_client_that_leaves_ends_the_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamacli.engine.native._PIECE_WORK", 1.0)
    with start(tmp_path, step_ms=0.01) as engine, served(engine, template=None) as server:
        chat(server, user("warm"))
        loaded = next(entry.loaded for entry in engine._entries.values())
        assert loaded is not None
        pictures, begun = loaded.scheduler.pictures, threading.Event()
        original = pictures.encode

        def slow(*given: Any) -> Any:
            begun.set()
            return original(*given)

        monkeypatch.setattr(pictures, "encode", slow)
        connection = server.connect()
        body = json.dumps({"messages": [user(ONE, "What?")], "stream": True})
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        assert begun.wait(60)
        connection.close()
        wait_for(lambda: not loaded.scheduler.busy)
        wait_for(lambda: pictures.tile is None)
        monkeypatch.setattr(pictures, "encode", original)
        assert text_of(chat(server, user(ONE, "What?"))) == alone(tmp_path, "idefics3", "What?", ONE)


@pytest.mark.parametrize("name", slow_but(["qwen3vl"], NAMES))
def test_preempted_prompts_are_evaluated_again(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = media(name)
    write(tmp_path, name)
    plan, calls = planning.Planner.plan, itertools.count()

    def preempting(self: planning.Planner) -> Any:
        if next(calls) in (2, 5, 9, 13, 17) and self.running.sequences:
            self.running.preempt(self.running.sequences[-1])
        return plan(self)

    expected = alone(tmp_path, name, "What?", one, other)
    monkeypatch.setattr(planning.Planner, "plan", preempting)
    with serving(tmp_path, name, step_ms=0.5) as server:
        assert text_of(chat(server, user(one, other, "What?"))) == expected


def test_several_choices_and_turns(tmp_path: Path) -> None:
    with serving(tmp_path, n_ctx=1024) as server:
        one = chat(server, user(ONE, "What?"))
        several = chat(server, user(ONE, "What?"), n=3)
        texts = {choice["message"]["content"] for choice in several["choices"]}
        assert texts == {one["choices"][0]["message"]["content"]}
        turns = [user(ONE, "What?"), {"role": "assistant", "content": text_of(one)}, user("And?", OTHER)]
        later = chat(server, *turns)
        assert later["usage"]["prompt_tokens_details"]["cached_tokens"] >= one["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", slow_but(["qwen3vl"], NAMES))
def test_adapters_and_pictures(tmp_path: Path, name: str) -> None:
    """Cells of a picture are shared by equal adapters only."""
    one, _ = media(name)
    path = write(tmp_path, name)
    lora = write_adapter(tmp_path / "lora.gguf", path, chosen=lambda tensor: "attn_" in tensor and "norm" not in tensor)
    with load_case(name)(path, "fp32", threads=1, lora_path=lora) as model:
        adapted = text_of(model.create_chat_completion([user(one, "What?")], max_tokens=N_NEW, temperature=0.0))
    plain = alone(tmp_path, name, "What?", one)
    assert adapted != plain
    with serving(tmp_path, name, adapters=((lora, 1.0),)) as server, ThreadPoolExecutor(4) as pool:
        scales = [1.0, 0.0, 1.0, 0.0]
        asked = [*pool.map(lambda scale: chat(server, user(one, "What?"), lora=[{"id": 0, "scale": scale}]), scales)]
        assert [text_of(reply) for reply in asked] == [adapted, plain] * 2


@pytest.mark.parametrize("name", slow_but(["qwen3vl"], NAMES))
def test_pictures_survive_a_restart(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = media(name)
    question = "What is it? " * 8  # longer than the shortest prefix that is written
    settings: dict[str, Any] = {"prompt_cache": (str(tmp_path / "prompts"), 1 << 30)}
    with serving(tmp_path, name, **settings) as server:
        first = chat(server, user(one, question))
    submit = Scheduler.submit

    def submitted(self: Scheduler, request: Any, *rest: Any) -> Any:
        done = submit(self, request, *rest)
        self.memory._reader.submit(lambda: None).result()  # what it reads is there before the first step
        return done

    monkeypatch.setattr(Scheduler, "submit", submitted)
    monkeypatch.setattr(LoadedEncoder, "_encoded", None)
    with serving(tmp_path, name, **settings) as server:
        again = chat(server, user(one, question))
    assert text_of(again) == text_of(first)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("name", slow_but(["qwen3vl"], NAMES))
def test_saved_slots_have_pictures(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = media(name)
    http = {"slot_folder": tmp_path}
    with serving(tmp_path, name, http=http) as server:
        first = chat(server, user(one, "What?"), id_slot=0)
        assert server.send("/slots/0?action=save", {"filename": "s.bin"}).status == 200
    monkeypatch.setattr(LoadedEncoder, "_encoded", None)
    with serving(tmp_path, name, http=http) as server:
        assert server.send("/slots/0?action=restore", {"filename": "s.bin"}).status == 200
        again = chat(server, user(one, "What?"), id_slot=0)
    assert text_of(again) == text_of(first)


def asked_by_openai(address: str) -> str:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
        reply = client.chat.completions.create(
            model="tiny", messages=[user(ONE, "What?")], max_tokens=N_NEW, temperature=0
        )
        part = {"type": "image_url", "image_url": {"url": "data:;base64,aGVsbG8="}}
        with pytest.raises(openai.BadRequestError, match="no picture of a known type"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [part]}])
        text: str = reply.choices[0].message.content
        return text


def asked_by_openai_responses(address: str) -> str:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
        parts = [
            {"type": "input_image", "image_url": uri(ONE), "detail": "auto"},
            {"type": "input_text", "text": "What?"},
        ]
        asked = [{"role": "user", "content": parts}]
        reply = client.responses.create(model="tiny", input=asked, max_output_tokens=N_NEW, temperature=0)
        with client.responses.stream(model="tiny", input=asked, max_output_tokens=N_NEW, temperature=0) as stream:
            assert "".join(one.delta for one in stream if one.type == "response.output_text.delta") == reply.output_text
        again = client.responses.create(
            model="tiny", input="And?", previous_response_id=reply.id, max_output_tokens=1, temperature=0
        )
        assert again.usage.input_tokens > reply.usage.input_tokens, "the picture is kept with the response"
        text: str = reply.output_text
        return text


def asked_by_ollama(address: str, folder: Path) -> str:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=address)
    try:
        (folder / "photo.png").write_bytes(png(ONE))
        options = {"temperature": 0, "num_predict": N_NEW}
        texts = set()
        for image in (png(ONE), str(folder / "photo.png"), b64(ONE)):
            message = {"role": "user", "content": "What?", "images": [image]}
            texts.add(client.chat(model="tiny", messages=[message], options=options).message.content)
        texts.add(client.generate(model="tiny", prompt="What?", images=[png(ONE)], options=options).response)
        assert "vision" in client.show("tiny").capabilities
        (text,) = texts
        return text
    finally:
        client._client.close()


def asked_by_anthropic(address: str) -> str:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=address, api_key="x", max_retries=0) as client:
        source = {"type": "base64", "media_type": "image/png", "data": b64(ONE)}
        parts = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
        asked = [{"role": "user", "content": parts}]
        greedy = {"model": "tiny", "max_tokens": N_NEW, "messages": asked, "extra_body": {"temperature": 0}}
        reply = client.messages.create(**greedy)
        with client.messages.stream(**greedy) as stream:
            assert "".join(stream.text_stream) == reply.content[0].text
        use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [parts[0]]}
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [use]}]
        given = {"model": "tiny", "max_tokens": 1}
        seen = client.messages.create(messages=[*turns, {"role": "user", "content": [result]}], **given)
        blind = client.messages.create(
            messages=[*turns, {"role": "user", "content": [{**result, "content": "sun"}]}], **given
        )
        n_seen, n_blind = (one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0) for one in (seen, blind))
        assert n_seen > n_blind + 16, "pictures of tools' results are seen"
        text: str = reply.content[0].text
        return text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("client", ["openai", "openai_responses", "ollama", "anthropic"])
def test_clients_of_other_projects(shared: Served, client: str, tmp_path: Path) -> None:
    whole = chat(shared, user(ONE, "What?"))["choices"][0]["message"]["content"]
    given = (tmp_path,) if client == "ollama" else ()
    assert globals()[f"asked_by_{client}"](f"http://127.0.0.1:{shared.port}", *given) == whole


ERRORS: dict[str, tuple[Any, int, str, str]] = {
    "no URI": ("hello", 400, "invalid_image", "not a data URI"),
    "no base64": ("data:image/png;base64,???", 400, "invalid_image", "not base64"),
    "plain data": ("data:image/png,abc", 400, "invalid_image", "not a data URI"),
    "no picture": ("data:image/png;base64,aGVsbG8gd29ybGQ=", 400, "invalid_image", "no picture"),
    "cut": (f"data:;base64,{base64.b64encode(png(ONE)[:200]).decode()}", 400, "invalid_image", "damaged"),
    "a file": ("file:///etc/passwd", 400, "unsupported_content", "--media-path"),
    "remote": ("https://example.org/x.png", 400, "unsupported_content", "--media-url"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("shared"), http={"max_body": 100 << 20}) as server:
        yield server


@pytest.mark.parametrize("case", ERRORS)
def test_bad_pictures(shared: Served, case: str) -> None:
    url, status, code, text = ERRORS[case]
    part = {"type": "image_url", "image_url": {"url": url}}
    reply = shared.send("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    error = reply.json["error"]
    assert (reply.status, error["code"]) == (status, code)
    assert text in error["message"]
    assert error["param"] == "messages[0].content[0].image_url"
    assert "/etc" not in error["message"].replace(url, "")


def bomb() -> bytes:
    """A PNG of 20,000 x 20,000 pixels in some hundred kilobytes."""
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


def text_bomb() -> bytes:
    """A PNG whose compressed metadata are 80 MB."""
    from PIL.PngImagePlugin import PngInfo

    info, file = PngInfo(), io.BytesIO()
    info.add_text("comment", "x" * (80 << 20), zip=True)
    Image.fromarray(ONE).save(file, "PNG", pnginfo=info)
    return file.getvalue()


def scan_bomb() -> bytes:
    """A JPEG whose last scan is there 3,000 times."""
    file = io.BytesIO()
    Image.new("RGB", (4000, 4000), (200, 10, 10)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 3000 + data[-2:]


def postscript() -> bytes:
    """An EPS file, for which Pillow would start Ghostscript."""
    file = io.BytesIO()
    Image.fromarray(ONE).save(file, "EPS")
    return file.getvalue()


@pytest.mark.parametrize(
    ("make", "text"),
    [(bomb, "pixels"), (text_bomb, "damaged"), (scan_bomb, "scans are more than"), (postscript, "of a known type")],
)
def test_bombs(shared: Served, make: Callable[[], bytes], text: str) -> None:
    data = make()
    assert len(data) < 1 << 20
    part = {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}"}}
    reply = shared.send("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_image")
    assert text in reply.json["error"]["message"]


def test_slow_grammars_with_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws beside the steps: equal texts, and an error of one text."""
    monkeypatch.setattr("llamacli.serve.scheduler.SLOW_DRAW_S", 0.0)
    ambiguous = {"grammar": "root ::= x x x x x x\nx ::= y y y y\ny ::= [a-z]? [a-z]? [a-z ]?"}
    with serving(tmp_path) as server, ThreadPoolExecutor(4) as pool:
        wanted = [{}, ambiguous, {}, ambiguous]
        pictures = [ONE, ONE, OTHER, OTHER]

        def ask(picture: np.ndarray, fields: dict[str, Any]) -> str:
            return text_of(chat(server, user(picture, "What?"), **fields))

        expected = [*map(ask, pictures, wanted)]
        assert [*pool.map(ask, pictures, wanted)] == expected
        assert all(set(text) <= {*map(chr, range(97, 123)), " "} for text in expected[1::2])
        with monkeypatch.context() as limits:
            limits.setattr("llamacli.serve.scheduler._MAX_DRAWS_S", 0.0)
            body = {"messages": [user(ONE, "What?")], "max_tokens": N_NEW, "temperature": 0, **ambiguous}
            refused = server.send("/v1/chat/completions", body)
        assert (refused.status, refused.json["error"]["message"][:28]) == (400, "the grammar takes too long: ")
        assert ask(ONE, {}) == expected[0]


def test_pictures_are_decoded_in_threads_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, encoded, decode, encode = set[str](), set[str](), Picture.of, LoadedEncoder._encoded

    def noted(given: object) -> Picture:
        decoded.add(threading.current_thread().name.rpartition("_")[0])
        return decode(given)

    def noted_too(self: LoadedEncoder, tile: Any) -> Any:
        encoded.add(threading.current_thread().name)
        return encode(self, tile)

    monkeypatch.setattr(Picture, "of", noted)
    monkeypatch.setattr(LoadedEncoder, "_encoded", noted_too)
    with serving(tmp_path) as server:
        chat(server, user(ONE, OTHER, "What?"))
    assert decoded == {"llamacli-picture"}
    assert len(encoded) == 1
    assert "picture" not in encoded.pop()


def test_many_and_large_pictures(shared: Served, tmp_path: Path) -> None:
    reply = shared.send("/v1/chat/completions", {"messages": [user(*[ONE] * 100, "What?")]})
    assert reply.status == 400
    assert "100 pictures; 64 are allowed" in reply.json["error"]["message"]
    reply = shared.send("/v1/chat/completions", {"messages": [user(*[ONE] * 60, "What?")]})
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    part = {"type": "image_url", "image_url": {"url": "data:;base64," + "A" * (50 << 20)}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    reply = shared.send("/v1/chat/completions", body)
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_image")
    assert "33554432" in reply.json["error"]["message"]
    with serving(tmp_path) as usual:
        reply = usual.send("/v1/chat/completions", body)
        assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")


def test_pictures_of_other_parts(shared: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": uri(ONE)}}
    reply = shared.send("/v1/chat/completions", {"messages": [{"role": "assistant", "content": [part]}, user("x")]})
    assert (reply.status, reply.json["error"]["code"]) == (400, "unsupported_content")
    reply = shared.send("/v1/chat/completions", {"messages": [user(ONE, "x")], "truncate_prompt_tokens": 5})
    assert (reply.status, reply.json["error"]["param"]) == (400, "truncate_prompt_tokens")
    reply = shared.send("/api/generate", {"model": "tiny", "prompt": "x", "raw": True, "images": [b64(ONE)]})
    assert reply.status == 400
    assert "chat template" in reply.json["error"]


def test_an_encoder_of_another_model(tmp_path: Path) -> None:
    """Beside the model it is left out; named, it is an error."""
    write_text(tmp_path / "text.gguf", "idefics3")
    other = write_mmproj(tmp_path / "mmproj-x.gguf", "idefics3", keys={"projection_dim": 96}, seed=" other")
    with serving(tmp_path) as server:
        reply = server.send("/v1/chat/completions", {"messages": [user(ONE, "x")]})
        assert reply.json["error"]["code"] == "unsupported_content"
    given = EngineSettings(threads=1, mode="fp32")
    engine = LocalEngine((ModelSource("tiny", tmp_path / "text.gguf", mmproj=other),), given, load_case("idefics3"))
    with contextlib.closing(engine), pytest.raises(ValueError, match=r"tiny idefics3 other.*another model"):
        engine.load("tiny").result()
