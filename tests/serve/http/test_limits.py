import pytest

from llamacli.serve.errors import PromptTooLongError
from llamacli.serve.http.limits import expect_room, longest_piece


def test_texts_that_may_fit_are_passed_on(fake) -> None:
    model, info = fake._model, fake.models()[0]
    longest = longest_piece(model)
    assert longest == 12
    expect_room(["x" * (1024 * longest - 1)], model, info)
    with pytest.raises(PromptTooLongError) as error:
        expect_room(["x" * 512 * longest, "\u20ac" * 171 * longest], model, info)
    assert error.value.details["n_ctx"] == 1024


def test_ids_are_counted(fake) -> None:
    model, info = fake._model, fake.models()[0]
    expect_room([[5] * 1012, "x" * 144], model, info)
    for parts in ([[5] * 1025], [[5] * 1012, "x" * 156]):
        with pytest.raises(PromptTooLongError, match=r"prompt of (at least )?1025 tokens"):
            expect_room(parts, model, info)


def test_texts_are_refused_by_their_beginning(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    model, info = fake._model, fake.models()[0]
    digits = "".join(chr(0x4E00 + i) for i in range(4095))  # of 12285 bytes, which 1024 tokens of twelve could have
    expect_room([digits], model, info)
    monkeypatch.setattr("llamacli.serve.http.limits.BEGINNING", 1)
    expect_room(["Once upon a time, there was a little girl. " * 100], model, info)
    with pytest.raises(PromptTooLongError, match="prompt of at least 2688 tokens"):
        expect_room([digits], model, info)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/api/generate"])
def test_of_megabytes_the_beginning_is_tokenized(path: str, http, fake, monkeypatch: pytest.MonkeyPatch) -> None:
    text, tokenizer, n_characters = "Once upon a time. " * 150_000, type(fake._model.tokenizer), 0
    encode = tokenizer.encode

    def counted(self: object, part: str, *args: object, **options: object) -> list[int]:
        nonlocal n_characters
        n_characters += len(part)
        return encode(self, part, *args, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    body = {"model": "demo", "prompt": text, "input": text, "messages": [{"role": "user", "content": text}]}
    assert http.send(path, body).status == 400
    assert n_characters < 10_000


def test_refusal_has_its_code(http) -> None:
    error = http.send("/v1/completions", {"prompt": "x" * 100_000}).json["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] >= 8000
