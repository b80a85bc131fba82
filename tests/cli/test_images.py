"""Pictures on the command line: --image, --mmproj, and /image in a chat."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from llamacli import load_model
from llamacli.cli.repl import Repl
from llamacli.cli.repl_input import dropped_pictures
from llamacli.cli.repl_settings import Settings
from llamacli.errors import InvalidRequestError, MediaError
from llamacli.plugins import Plugins
from llamacli.sampling import SamplingParams
from llamacli.testing.tiny_media import drawn
from media_cases import CASES, write_mmproj, write_text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    write_mmproj(tmp_path / "mmproj-text.gguf", "gemma3")
    return write_text(tmp_path / "text.gguf", "gemma3")


@pytest.fixture
def photo(tmp_path: Path) -> Callable[[int], Path]:
    def write(seed: int = 0) -> Path:
        path = tmp_path / f"photo{seed}.png"
        Image.fromarray(drawn(40, 30, seed)).save(path)
        return path

    return write


OPTIONS = ("-n", "4", "--temp", "0", "--json", "--mode", "fp32")


def test_the_picture_is_part_of_the_prompt(invoke, text, photo) -> None:
    def asked(*images: Path) -> dict[str, object]:
        given = [part for image in images for part in ("--image", image)]
        result = invoke("run", text, *given, "What is it?", *OPTIONS, "--logprobs", "1")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    without, one, other, both = asked(), asked(photo(0)), asked(photo(1)), asked(photo(0), photo(1))
    n = [found["stats"]["n_prompt"] for found in (without, one, other, both)]
    assert n == [n[0], n[0] + 6, n[0] + 6, n[0] + 12]  # 4 rows and two tokens around them
    assert one["logprobs"] != other["logprobs"]
    assert asked(photo(0))["logprobs"] == one["logprobs"]


def test_a_picture_alone_is_a_message(invoke, text, photo) -> None:
    assert invoke("run", text, "--image", photo(0), *OPTIONS).exit_code == 0


def test_another_encoder(invoke, text, photo, tmp_path: Path) -> None:
    other = write_mmproj(tmp_path / "v.gguf", "gemma3")
    result = invoke("run", text, "--mmproj", other, "--image", photo(0), "x", *OPTIONS)
    assert result.exit_code == 0, result.stderr
    wrong = write_mmproj(tmp_path / "wrong.gguf", "gemma3", keys={"projection_dim": 96})
    result = invoke("run", text, "-mm", wrong, "--image", photo(0), "x")
    assert result.exit_code == 1
    assert "'tiny gemma3' makes embeddings of 96 numbers, and the model 'tiny media gemma3'" in result.stderr


def test_errors(invoke, text, photo, tmp_path: Path) -> None:
    result = invoke("run", text, "--image", tmp_path / "none.png", "x")
    assert "none.png" in result.stderr
    (tmp_path / "text.png").write_text("hello")
    result = invoke("run", text, "--image", tmp_path / "text.png", "x")
    assert result.exit_code == 1
    assert "text.png is no picture of a known type" in result.stderr
    result = invoke("run", text, "--raw", "--image", photo(0), "x")
    assert result.exit_code == 2
    assert "--image is for chats" in result.stderr
    (tmp_path / "mmproj-text.gguf").unlink()
    result = invoke("run", text, "--image", photo(0), "x")
    assert result.exit_code == 1
    assert "the model 'tiny media gemma3' has no encoder of pictures" in result.stderr


@pytest.mark.medium
def test_pictures_in_lines_of_a_batch(invoke, text, photo, tmp_path: Path) -> None:
    def line(number: int, url: str) -> str:
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
        return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})

    urls = [f"data:image/png;base64,{base64.b64encode(photo(seed).read_bytes()).decode()}" for seed in (0, 1, 0)]
    (tmp_path / "all.jsonl").write_text(
        "\n".join(line(i, url) for i, url in enumerate([*urls, "data:;base64,aGVsbG8="]))
    )
    result = invoke("batch", tmp_path / "all.jsonl", text, "--mode", "fp32")
    assert result.exit_code == 1
    answers = [json.loads(one) for one in (tmp_path / "all.results.jsonl").read_text().splitlines()]
    texts = [one["response"]["body"]["choices"][0]["message"]["content"] for one in answers[:3]]
    alone = json.loads(invoke("run", text, "--image", photo(0), "What is it?", *OPTIONS).stdout)["text"]
    assert texts[0] == texts[2] == alone
    assert answers[3]["response"]["body"]["error"]["code"] == "invalid_image"


class TestChat:
    @pytest.fixture
    def repl(self, text: Path):
        case = CASES["gemma3"]
        plugins = Plugins.of(case.text, media=[case.encoder])
        with load_model(text, "fp32", plugins=plugins, threads=1) as model, model.create_chat(max_tokens=3) as chat:
            settings = Settings(chat, SamplingParams(), seed=1, verbose=False, log=False, draft_max=4)
            yield Repl(settings, shift=False, logged=None)

    def test_a_picture_goes_with_the_next_message(self, repl: Repl, photo, capsys: pytest.CaptureFixture[str]) -> None:
        path = photo(0)
        repl._handle(f"/image {path}")
        assert "attached to the next message" in capsys.readouterr().err
        repl._handle("/show")
        assert path.name in capsys.readouterr().err
        repl._handle("What is it?")
        (message, reply) = repl._chat.history
        assert (message.content, len(message.images), reply.role) == ("What is it?", 1, "assistant")
        repl._handle("/regen 5")
        assert len(repl._chat.history[0].images) == 1
        repl._handle("And now?")
        assert repl._chat.history[2].images == ()

    def test_a_chat_is_saved_with_its_pictures(self, repl: Repl, photo, tmp_path: Path) -> None:
        repl._handle(f"/image {photo(0)}")
        repl._handle("What is it?")
        repl._handle(f"/save {tmp_path / 'chat.json'}")
        repl._handle("/clear")
        repl._handle(f"/load {tmp_path / 'chat.json'}")
        assert (repl._chat.history[0].images[0].pixels == drawn(40, 30)).all()

    def test_a_path_in_a_message_is_a_picture(self, repl: Repl, photo, capsys: pytest.CaptureFixture[str]) -> None:
        repl._handle(f"{photo(0)} What is it?")
        assert "(photo0.png: attached)" in capsys.readouterr().err
        (message, _) = repl._chat.history
        assert (message.content, len(message.images)) == ("What is it?", 1)
        repl._handle(f"Compare '{photo(1)}' and this: {photo(0)}?")
        message = repl._chat.history[2]
        assert (message.content, len(message.images)) == ("Compare and this:?", 2)
        repl._handle(str(photo(2)))
        message = repl._chat.history[4]
        assert (message.content, len(message.images)) == ("", 1)

    def test_a_path_for_a_model_that_does_not_see(
        self, repl: Repl, photo, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(repl._chat.model, "_load_media", lambda model: None)
        repl._handle(f"{photo(0)} What is it?")
        assert "not attached, the path is sent: the model 'tiny media gemma3' has no encoder" in capsys.readouterr().err
        assert (repl._chat.history[0].content, repl._chat.history[0].images) == (f"{photo(0)} What is it?", ())

    def test_names_with_spaces(self, repl: Repl, photo, tmp_path: Path) -> None:
        path = photo(0).rename(tmp_path / "a photo.png")
        escaped = str(path).replace(" ", "\\ ")
        for given in (path, f"'{path}'", f'"{path}"', escaped):
            repl._handle(f"/image {given}")
        assert [path for path, _ in repl._attached] == [path] * 4
        repl._attached.clear()
        repl._handle(f"{escaped} file://{str(path).replace(' ', '%20')} '{path}' look")
        assert [len(message.images) for message in repl._chat.history] == [3, 0]

    def test_wrong_files(self, repl: Repl, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match="/image needs a file name"):
            repl._handle("/image")
        with pytest.raises(MediaError, match=r"none\.png: no such file"):
            repl._handle(f"/image {tmp_path / 'none.png'}")
        assert repl._attached == []


@pytest.mark.parametrize(
    "text", ["/etc/none.png is gone", "photo.png", "a./photo.png", "'/etc/none.png'", "http://host/a.png", "/help", ""]
)
def test_messages_without_pictures(text: str) -> None:
    assert dropped_pictures(text) == (text, [])
