"""Sound in the server: parts of chats, transcriptions, refusals."""

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from http_server import Served, served, wait_for
from llamacli import Model, load_model
from llamacli.media import sound
from llamacli.plugins import Plugins
from llamacli.serve.engine import LocalEngine
from llamacli.serve.models import ModelSource
from llamacli.serve.settings import EngineSettings
from llamacli.testing.tiny_media import tone
from sound_cases import CASES, wav, write_hearing

pytestmark = pytest.mark.medium

NAME, N_NEW = "qwen3a", 6


def load(path: Path, mode: str, **options: Any) -> Model:
    plugins = Plugins.of(CASES[NAME].text, media=[CASES[NAME].encoder])
    return load_model(path, mode, plugins=plugins, **options)


@contextlib.contextmanager
def serving(folder: Path, loader: Callable[..., Model] = load, **http: Any) -> Iterator[Served]:
    write_hearing(folder, NAME)
    settings = EngineSettings(threads=1, n_ctx=256, mode="fp32", step_ms=0.1)
    engine = LocalEngine((ModelSource("tiny", folder / "text.gguf"),), settings, loader)
    try:
        with served(engine, template=None, **http) as server:
            yield server
    finally:
        engine.close()


def part(samples: np.ndarray | str) -> dict[str, Any]:
    data = samples if isinstance(samples, str) else base64.b64encode(wav(samples)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def asked(server: Served, *parts: dict[str, Any], **fields: Any) -> Any:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    return server.send("/v1/chat/completions", {"messages": messages, "max_tokens": N_NEW, "temperature": 0, **fields})


def test_chats_and_transcriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hearing(tmp_path, NAME)
    messages = [{"role": "user", "content": [part(tone()), {"type": "text", "text": "What?"}]}]
    with load(tmp_path / "text.gguf", "fp32", threads=1) as model:
        expected = model.create_chat_completion(messages, max_tokens=N_NEW, temperature=0.0)["choices"]
    monkeypatch.setattr("llamacli.engine.native._PIECE_WORK", 1e5)
    with serving(tmp_path) as server:
        reply = asked(server, part(tone())).json
        assert reply["choices"][0]["message"]["content"] == expected[0]["message"]["content"]
        again = asked(server, part(tone())).json
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
        other = asked(server, part(tone(hertz=900))).json["usage"]
        assert other["prompt_tokens_details"]["cached_tokens"] < 8
        assert server.send("/props", method="GET").json["modalities"] == {"vision": False, "audio": True}
        (listed,) = server.send("/v1/models", method="GET").json["data"]
        assert listed["architecture"]["input_modalities"] == ["text", "audio"]

        client, file = server.openai(max_retries=0), ("a.wav", wav(tone()))
        options: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"max_tokens": N_NEW}}
        written = client.audio.transcriptions.create(file=file, **options).text
        text = [{"type": "text", "text": "Transcribe audio to text"}, part(tone())]
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": N_NEW, "temperature": 0}
        whole = server.send("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
        assert written == whole.strip()
        assert client.audio.transcriptions.create(file=file, response_format="text", **options).strip() == written
        guided = client.audio.transcriptions.create(file=file, language="de", prompt="Write", **options).text
        assert guided != written


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_forms_of_a_transcription(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    decode = sound._decoded
    monkeypatch.setattr(sound, "_decoded", lambda source, name: (decoded.append(name), decode(source, name))[1])
    with serving(tmp_path) as server:
        client = server.openai(max_retries=0)
        options: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"max_tokens": N_NEW}}
        options["file"] = ("a.wav", wav(tone()))
        whole = client.audio.transcriptions.create(**options)
        assert whole.usage.type == "tokens"
        assert whole.usage.total_tokens == whole.usage.input_tokens + N_NEW
        events = [*client.audio.transcriptions.create(stream=True, **options)]
        assert {one.type for one in events[:-1]} == {"transcript.text.delta"}
        assert events[-1].type == "transcript.text.done"
        assert "".join(one.delta for one in events[:-1]).strip() == events[-1].text == whole.text
        assert events[-1].usage.output_tokens == N_NEW
        spoken = {"language": "de", "response_format": "verbose_json"}
        verbose = client.audio.transcriptions.create(**options, **spoken)
        assert (verbose.duration, verbose.usage.seconds, verbose.language) == (0.6, 0.6, "de")
        assert (verbose.segments, verbose.words) == (None, None)
        translated = client.audio.translations.create(**options)
        asked_too = client.audio.transcriptions.create(prompt="Translate audio to English text", **options)
        assert translated.text == asked_too.text != whole.text
        verbose = client.audio.translations.create(response_format="verbose_json", **options)
        assert (verbose.text, verbose.language, verbose.duration) == (translated.text, "english", 0.6)
    assert len(decoded) == 1, "its layout and its length are kept"


def test_every_api_with_a_form_for_sound(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        whole = asked(server, part(tone())).json["choices"][0]["message"]["content"]
        parts = [part(tone()), {"type": "input_text", "text": "What?"}]
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": N_NEW, "temperature": 0}
        answer = server.send("/v1/responses", body).json
        assert answer["output"][0]["content"][0]["text"] == whole
        again = {"input": "And?", "previous_response_id": answer["id"], "max_output_tokens": 1}
        usage = server.send("/v1/responses", again).json["usage"]
        assert usage["input_tokens"] > answer["usage"]["input_tokens"], "the sound is kept with the response"
        del parts[0]["input_audio"]
        assert "content[0].input_audio" in server.send("/v1/responses", body).json["error"]["message"]
        assert "audio" in server.send("/api/show", {"model": "tiny"}).json["capabilities"]
        message = {"role": "user", "content": "What?", "images": [part(tone())["input_audio"]["data"]]}
        reply = server.send("/api/chat", {"model": "tiny", "messages": [message]})
        assert (reply.status, "messages[0].images: not supported, this model hears and" in reply.json["error"]) == (
            400,
            True,
        )
        block = {"type": "audio", "source": {"type": "base64", "media_type": "audio/wav", "data": "AAAA"}}
        body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}
        reply = server.send("/v1/messages", body)
        assert (reply.status, "'audio'" in reply.json["error"]["message"]) == (400, True)


def test_batches(tmp_path: Path) -> None:
    """A line hears as a request does; forms have no lines."""
    message = {"role": "user", "content": [part(tone()), {"type": "text", "text": "What?"}]}
    body = {"messages": [message], "max_tokens": N_NEW, "temperature": 0}
    cut = {**body, "messages": [{**message, "content": [part("UklGRgAA")]}]}
    path, form = "/v1/chat/completions", "/v1/audio/transcriptions"
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": url, "body": fields})
        for i, (url, fields) in enumerate([(path, body), (path, cut), (form, body)])
    ]
    with serving(tmp_path, data=tmp_path / "data") as server:
        client, direct = server.openai(max_retries=0), asked(server, part(tone())).json
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h")
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)

        def results(name: str | None) -> list[Any]:
            assert name is not None
            return [json.loads(line) for line in client.files.content(name).text.splitlines()]

        (answer,) = results(done.output_file_id)
        assert answer["response"]["body"]["choices"] == direct["choices"]
        damaged, refused = results(done.error_file_id)
        assert damaged["response"]["body"]["error"]["code"] == "invalid_audio"
        assert "messages[0].content[0].input_audio: " in damaged["response"]["body"]["error"]["message"]
        assert "line 3: url: '/v1/audio/transcriptions' takes a form, lines have JSON" in refused["error"]["message"]
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            client.batches.create(input_file_id=file.id, endpoint=form, completion_window="24h")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_what_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, max_body=100_000) as server:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        for given, code, reason in [
            (part("a b"), "invalid_audio", "its data is not base64"),
            (part(base64.b64encode(wav(tone())[:99]).decode()), "invalid_audio", "the sound is damaged"),
            (part(base64.b64encode(b"GIF89a").decode()), "invalid_audio", "no sound of a known type"),
            (picture, "unsupported_content", "this model hears and does not see"),
        ]:
            reply = asked(server, given)
            error = reply.json["error"]
            assert (reply.status, error["code"]) == (400, code)
            assert error["param"] == f"messages[0].content[0].{given['type']}"
            assert reason in error["message"]
        long = asked(server, part(tone(1.5)), max_tokens=500)
        assert long.status == 200
        client = server.openai(max_retries=0)
        for options, status, place in [
            ({"file": ("a.wav", b"RIFF")}, 400, "file"),
            ({"file": ("a.wav", wav(tone(4.0)))}, 413, "file"),
            ({"response_format": "srt"}, 400, "response_format: 'srt' is not supported: models write text without"),
            ({"response_format": "vtt"}, 400, "response_format"),
            ({"response_format": "diarized_json"}, 400, "response_format"),
            ({"response_format": "verbose_json", "timestamp_granularities": ["word"]}, 400, "timestamp_granularities"),
            ({"response_format": "verbose_json", "stream": True}, 400, "stream"),
            ({"include": ["logprobs"]}, 400, "include"),
            ({"temperature": -1}, 400, "temperature"),
            ({"prompt": "x" * 70_000}, 400, "prompt: more than 65536 bytes"),
            ({"model": "other"}, 404, "the model 'other'"),
        ]:
            given = {"model": "tiny", "file": ("a.wav", wav(tone())), **options}
            with pytest.raises(openai.APIStatusError) as caught:
                client.audio.transcriptions.create(**given)
            error = caught.value.body
            assert isinstance(error, dict)
            assert (caught.value.status_code, error["message"][: len(place)]) == (status, place)
        with pytest.raises(openai.BadRequestError, match="models write text without times"):
            client.audio.translations.create(model="tiny", file=("a.wav", wav(tone())), response_format="vtt")
        with pytest.raises(openai.BadRequestError, match="translations are in English"):
            client.audio.translations.create(model="tiny", file=("a.wav", wav(tone())), extra_body={"language": "de"})


def test_much_sound(tmp_path: Path) -> None:
    with serving(tmp_path, max_body=100 << 20) as server:
        for given, code, reason in [
            ([part(tone(30))], "context_length_exceeded", ""),
            ([part(tone(0.1))] * 60, "context_length_exceeded", ""),
            ([part(tone(0.1))] * 100, None, "messages: 100 sounds; 64 are allowed"),
            ([part("A" * (90 << 20))], "invalid_audio", "70778880 bytes are more than the 67108864 of sound"),
        ]:
            error = asked(server, *given).json["error"]
            assert (error["code"], reason in error["message"]) == (code or error["code"], True)


def test_an_encoder_of_another_model(tmp_path: Path) -> None:
    """A file that does not fit is an error with both names."""
    write_hearing(tmp_path, NAME)
    other = tmp_path / "other"
    other.mkdir()
    write_hearing(other, NAME, {"projection_dim": 96})
    (tmp_path / "mmproj-text.gguf").unlink()
    source = ModelSource("tiny", tmp_path / "text.gguf", mmproj=other / "mmproj-text.gguf")
    engine = LocalEngine((source,), EngineSettings(threads=1, mode="fp32"), load)
    with contextlib.closing(engine), pytest.raises(ValueError, match=r"tiny qwen3a.*another model"):
        engine.load("tiny").result()


def test_a_model_without_an_encoder(tmp_path: Path) -> None:
    def deaf(path: Path, mode: str, **options: Any) -> Model:
        (path.parent / "mmproj-text.gguf").unlink(missing_ok=True)
        return load(path, mode, **options)

    with serving(tmp_path, deaf) as server:
        error = asked(server, part(tone())).json["error"]
        assert "parts of type 'input_audio' are not supported, only text" in error["message"]
        with pytest.raises(openai.BadRequestError, match="this model has no encoder of sound"):
            server.openai(max_retries=0).audio.transcriptions.create(model="tiny", file=("a.wav", wav(tone())))
