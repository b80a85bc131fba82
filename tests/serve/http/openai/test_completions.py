"""Text completions, by OpenAI's official client and as lm-eval scores."""

import openai
import pytest

from llamacli.serve.http.prompts import as_prompts
from llamacli.serve.requests import Admitted, Done, Finished, PromptLogprobs, TextDelta, Timings, TokenLogprob, Usage

DONE = Done(Usage(3, 0, 1), Timings(0.0, 0.1, 0.1))


def scored(fake):
    """Script of a prompt's log-probabilities and one token, whatever the prompt."""

    def script(request):
        events = [Admitted(0.0)]
        for i, prompt in enumerate(request.prompts):
            pieces = [fake._model.tokenizer.piece_bytes(token) for token in prompt]
            tokens = [
                TokenLogprob(token, piece, -float(k) if k else None, ((9, b"Z", -0.25),) if k else ())
                for k, (token, piece) in enumerate(zip(prompt, pieces, strict=True))
            ]
            events += [PromptLogprobs(i, tuple(tokens))]
            events += [TextDelta(i, "!", tokens=(TokenLogprob(7, b"!", -0.5, ((7, b"!", -0.5),)),))]
            events += [Finished(i, "length")]
        return [*events, DONE]

    return script


def test_texts_and_ids(http, fake) -> None:
    with http.openai() as client:
        one = client.completions.create(model="demo", prompt="Once upon")
        ids = client.completions.create(model="demo", prompt=[5, 6, 7])
        many = client.completions.create(model="demo", prompt=["a", "b"], n=2)
        mixed = client.completions.create(model="demo", prompt=[[5, 6], [7]])
    assert (one.object, one.choices[0].text, one.choices[0].logprobs) == ("text_completion", "one two three", None)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert (len(ids.choices), len(mixed.choices)) == (1, 2)
    bos = fake._model.tokenizer.bos_id
    assert fake.requests[0].prompts[0][0] == bos
    assert fake.requests[1].prompts == ((5, 6, 7),)
    assert fake.requests[3].prompts == ((5, 6), (7,))
    assert fake.requests[0].max_tokens == 16
    assert fake.requests[0].reply is None


def test_special_tokens_in_texts(http, fake) -> None:
    special = next(token for token in fake._model.tokenizer.special_ids if fake._model.tokenizer.is_control(token))
    text = fake._model.tokenizer.token_text(special)
    http.send("/v1/completions", {"prompt": f"a{text}b"})
    http.send("/v1/completions", {"prompt": f"a{text}b", "parse_special": True})
    assert special not in fake.requests[0].prompts[0][1:]
    assert special in fake.requests[1].prompts[0][1:]


def test_echo(http) -> None:
    with http.openai() as client:
        assert client.completions.create(model="demo", prompt="Hi,", echo=True).choices[0].text == "Hi,one two three"
        chunks = client.completions.create(model="demo", prompt="Hi,", echo=True, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hi,one two three"


@pytest.mark.parametrize(("default", "expected"), [(-1, None), (7, 7)])
def test_the_server_may_have_another_limit(default: int, expected: int | None, serve, fake) -> None:
    serve(max_tokens=default).send("/v1/completions", {"prompt": "a"})
    assert fake.requests[0].max_tokens == expected


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_as_lm_eval_reads_them(max_tokens: int, http, fake) -> None:
    fake.script = scored(fake)
    prompt = [10, 11, 12]
    body = {"prompt": [prompt], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    choice = http.send("/v1/completions", body).json["choices"][0]
    assert (fake.requests[0].prompt_logprobs, fake.requests[0].max_tokens) == (1, max_tokens)
    logprobs = choice["logprobs"]
    n_context = 1
    scores = logprobs["token_logprobs"][n_context:-1]
    assert scores == [-1.0, -2.0]
    for token, top in zip(logprobs["tokens"][n_context:-1], logprobs["top_logprobs"][n_context:-1], strict=True):
        assert top[token] != max(top.values())  # what lm-eval asks to know whether a token is the greedy one
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][0] == 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_parts_of_characters_have_their_own_names(http, fake) -> None:
    tokens = tuple(TokenLogprob(i, piece, -1.0, ((0, b"\xe2", -1.0), (1, b"\x82", -2.0)))
                   for i, piece in enumerate([b"\xe2", b"\x82", b"\xac"]))  # fmt: skip
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "\u20ac", tokens=tokens), Finished(0, "stop"), DONE]
    logprobs = http.send("/v1/completions", {"prompt": "x", "logprobs": 2}).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert list(logprobs["top_logprobs"][0]) == ["bytes:\\xe2", "bytes:\\x82"]
    assert logprobs["text_offset"] == [0, 0, 0]


def test_stream_of_scores(http, fake) -> None:
    fake.script = scored(fake)
    chunks = http.send("/v1/completions", {"prompt": [10, 11], "echo": True, "logprobs": 1, "stream": True}).events
    tokens = [
        token
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for token in chunk["choices"][0]["logprobs"]["tokens"]
    ]
    assert len(tokens) == 3
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).endswith("!")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [2048]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "suffix": "b", "echo": True}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ],
)
def test_refused_requests(fields: dict, param: str, http, fake) -> None:
    reply = http.send("/v1/completions", fields)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not fake.requests


def test_infilling_with_the_tokens_of_the_file(fake, http, monkeypatch) -> None:
    monkeypatch.setattr(fake._model.tokenizer, "infill_ids", (4, 5, 6))
    http.send("/v1/completions", {"prompt": "a", "suffix": "b"})
    encode = fake._model.tokenizer.encode_run
    bos = fake._model.tokenizer.bos_id
    expected = (bos, 4, *encode("a", continues=True), 5, *encode("b", continues=True), 6)
    assert fake.requests[0].prompts == (expected,)


def test_prompts_one_by_one() -> None:
    assert as_prompts("a", "prompt", 4) == ["a"]
    assert as_prompts([1, 2], "prompt", 4) == [[1, 2]]
    assert as_prompts(["a", [1]], "prompt", 4) == ["a", [1]]


def test_errors_have_the_clients_types(http) -> None:
    with http.openai() as client, pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="demo", prompt="x", n=99)
    assert error.value.param == "n"
