import pytest

from http_server import TEMPLATE


def test_tokens_there_and_back(http, fake) -> None:
    text = "Once upon a time, h\xe9!"
    tokens = http.send("/tokenize", {"content": text}).json["tokens"]
    assert tokens == fake._model.tokenizer.encode(text, add_special=False)
    assert http.send("/detokenize", {"tokens": tokens}).json["content"] == text
    with_bos = http.send("/tokenize", {"content": text, "add_special": True}).json["tokens"]
    assert with_bos == fake._model.tokenizer.encode(text)


def test_pieces(http) -> None:
    tokens = http.send("/tokenize", {"content": "a\u20ac", "with_pieces": True}).json["tokens"]
    pieces = [one["piece"] for one in tokens]
    joined = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    assert joined.decode() == "a\u20ac"


def test_vllms_forms(http) -> None:
    body = http.send("/tokenize", {"prompt": "a b"}).json
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 512
    chat = http.send("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json
    assert http.send("/detokenize", {"tokens": chat["tokens"][1:]}).json["content"] == "<user>hi\n<assistant>"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"content": "a", "prompt": "b"}),
        ("/detokenize", {"tokens": [2048]}),
        ("/detokenize", {}),
        ("/apply-template", {"messages": []}),
    ],
)
def test_refused_requests(path: str, body: dict, http) -> None:
    assert http.send(path, body).status == 400


def test_apply_template(http) -> None:
    body = http.send("/apply-template", {"messages": [{"role": "developer", "content": "x"}]}).json
    assert body["prompt"].endswith("<system>x\n<assistant>")


def test_props(http) -> None:
    props = http.send("/props").json
    assert (props["model_path"], props["n_ctx"], props["chat_template"]) == ("demo.gguf", 512, TEMPLATE)
    assert props["default_generation_settings"]["params"]["top_k"] == 40


def test_slots_are_off_by_default(http, serve) -> None:
    assert http.send("/slots").status == 501
    assert serve(slots=True).send("/slots").json == []


def test_head(http) -> None:
    reply = http.send("/health", method="HEAD")
    assert (reply.status, reply.body) == (200, b"")


def test_health(http, fake) -> None:
    assert http.send("/health").json == {"status": "ok"}
    fake.draining = True
    reply = http.send("/health")
    assert (reply.status, reply.json["error"]["code"]) == (503, "draining")


def test_greeting_without_a_page(http) -> None:
    assert b"/openapi.json" in http.send("/").body
