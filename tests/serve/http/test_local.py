import attrs
import pytest

from http_server import TEMPLATE, wait_for
from llamacli.serve.requests import AdapterInfo


def test_tokens_there_and_back(http, fake) -> None:
    text = "Once upon a time, h\xe9!"
    tokens = http.send("/tokenize", {"content": text}).json["tokens"]
    assert tokens == fake._model.tokenizer.encode(text, add_special=False)
    assert http.send("/detokenize", {"tokens": tokens}).json["content"] == text
    with_bos = http.send("/tokenize", {"content": text, "add_special": True}).json["tokens"]
    assert with_bos == fake._model.tokenizer.encode(text)


def test_long_texts_are_refused(http) -> None:
    limit = 2 << 20
    half = {"role": "user", "content": "x" * (limit // 2)}
    for name, value in (
        ("content", "x" * (limit + 1)),
        ("messages", [half, half, {"role": "user", "content": "x"}]),
        ("messages", [half, {**half, "role": "assistant", "content": "x" * (limit // 2 - 1)}]),  # and the template's
    ):
        reply = http.send("/tokenize", {name: value})
        assert (reply.status, reply.json["error"]["param"]) == (400, name)
        assert "2097152 are allowed" in reply.json["error"]["message"]


def test_pieces(http) -> None:
    tokens = http.send("/tokenize", {"content": "a\u20ac", "with_pieces": True}).json["tokens"]
    pieces = [one["piece"] for one in tokens]
    joined = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    assert joined.decode() == "a\u20ac"


def test_vllms_forms(http) -> None:
    body = http.send("/tokenize", {"prompt": "a b"}).json
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 1024
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


def test_tokenizer_info(http, fake) -> None:
    tokenizer, info = fake._model.tokenizer, http.send("/tokenizer_info").json
    assert info["eos_token"] == tokenizer.token_text(tokenizer.eos_id)
    assert (info["pad_token"], info["model_max_length"], info["chat_template"]) == (None, 1024, TEMPLATE)
    body = {"prompt": info["eos_token"], "add_special_tokens": False}  # lm-eval asks for the ids of these texts
    assert http.send("/tokenize", body).json["tokens"] == [tokenizer.eos_id]


def test_apply_template(http) -> None:
    body = http.send("/apply-template", {"messages": [{"role": "developer", "content": "x"}]}).json
    assert body["prompt"].endswith("<system>x\n<assistant>")


def test_props(http) -> None:
    props = http.send("/props").json
    assert (props["model_path"], props["n_ctx"], props["chat_template"]) == ("demo.gguf", 1024, TEMPLATE)
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    table = {one["name"]: one for one in props["sampling_parameters"]}
    assert table["top_p"] == {
        "name": "top_p", "group": "Choice of tokens", "type": "number", "minimum": 0, "maximum": 1,
        "description": "Nucleus sampling: keep the most likely tokens with a total probability of p; 1: off.",
    }  # fmt: skip
    assert all(one["group"] and one["description"].endswith(".") for one in table.values())


@pytest.mark.parametrize("path", ["/props", "/tokenizer_info", "/lora-adapters", "/slots"])
def test_models_are_named_by_the_query(path: str, serve) -> None:
    http = serve(slots=True)
    assert http.send(f"{path}?model=demo").json == http.send(path).json
    reply = http.send(f"{path}?model=other%20one")
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
    assert "'other one'" in reply.json["error"]["message"]


def test_slots_are_off_by_default(http, serve) -> None:
    assert http.send("/slots").status == 501
    slots = serve(slots=True, total_slots=2).send("/slots").json
    idle = {"model": "demo", "n_ctx": 1024, "is_processing": False}
    assert slots == [{**idle, "id": 0}, {**idle, "id": 1}]


def test_head(http) -> None:
    reply = http.send("/health", method="HEAD")
    assert (reply.status, reply.body) == (200, b"")


def test_health(http, fake) -> None:
    assert http.send("/health").json == {"status": "ok"}
    for status in ("stage_lost", "loading", "stuck", "draining"):
        fake.status = status
        reply = http.send("/health")
        assert (reply.status, reply.json["error"]["code"]) == (503, status)


def test_greeting_without_a_page(http) -> None:
    assert b"/openapi.json" in http.send("/").body


def test_adapters_are_listed_and_set(http, fake) -> None:
    assert http.send("/lora-adapters").json == []
    fake.adapters = (AdapterInfo(0, "/models/a.gguf", 1.0), AdapterInfo(1, "/models/b.gguf", 0.5))
    assert http.send("/lora-adapters").json == [
        {"id": 0, "path": "a.gguf", "scale": 1.0},
        {"id": 1, "path": "b.gguf", "scale": 0.5},
    ]
    assert http.send("/lora-adapters", [{"id": 1, "scale": 0.25}]).json == {"success": True}
    assert [one["scale"] for one in http.send("/lora-adapters").json] == [0.0, 0.25]


def test_fingerprints_tell_scales_of_adapters_and_templates(http, fake, serve) -> None:
    def fingerprint(server=http) -> str:
        return server.send("/v1/completions", {"prompt": "a", "max_tokens": 1}).json["system_fingerprint"]

    fake.adapters = (AdapterInfo(0, "a.gguf", 0.0), AdapterInfo(1, "b.gguf", 0.0))
    found = [fingerprint()]
    for scale in (0.5, 1.0, 0.5):
        http.send("/lora-adapters", [{"id": 1, "scale": scale}])
        found.append(fingerprint())
    assert found[1] == found[3]
    found += [fingerprint(serve(template=template)) for template in ("chatml", "{{ messages }}")]
    found += [fingerprint(serve(**{name: value})) for name, value in (("sampling", {"top_k": 3}), ("reasoning", False))]
    assert len(set(found)) == 7


def test_adapters_of_requests_are_the_servers_or_their_own(http, fake) -> None:
    fake.adapters = (AdapterInfo(0, "a.gguf", 1.0), AdapterInfo(1, "b.gguf", 0.5))
    for lora, expected in ((None, ((0, 1.0), (1, 0.5))), ([], ()), ([{"id": 1, "scale": -2}], ((1, -2.0),))):
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            assert http.send(path, {**body, "lora": lora}).status == 200
            assert fake.requests[-1].adapters == expected
    assert http.send("/api/generate", {"model": "demo", "prompt": "a", "stream": False}).status == 200
    assert fake.requests[-1].adapters == ((0, 1.0), (1, 0.5))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ([{"id": 2, "scale": 1}], "[0].id: 2 is none of the 2 adapters"),
        ([{"id": 0, "scale": 1}, {"id": 0, "scale": 1}], "[1].id: 0 is there twice"),
        ([{"id": 0, "scale": "much"}], "[0].scale: "),
        ([{"id": 0}], "[0].scale: it is required"),
        ([{"id": -1, "scale": 1}], "[0].id: "),
    ],
)
def test_wrong_adapters_are_refused(lora, message: str, http, fake) -> None:
    fake.adapters = (AdapterInfo(0, "a.gguf", 1.0), AdapterInfo(1, "b.gguf", 0.5))
    for path, body in (("/lora-adapters", lora), ("/v1/completions", {"prompt": "a", "lora": lora})):
        reply = http.send(path, body)
        assert reply.status == 400
        assert message in reply.json["error"]["message"]
    assert fake.adapters[0].scale == 1.0


def test_adapters_are_set_by_an_array(http) -> None:
    reply = http.send("/lora-adapters", {"id": 0, "scale": 1})
    assert (reply.status, reply.json["error"]["message"]) == (400, "the body is not a JSON array")


def test_models_that_only_a_request_of_their_own_loads(serve, fake, monkeypatch) -> None:
    """`--no-models-autoload`, and the properties of llama-server's router."""
    http, (info,) = serve(autoload=False, models_max=3), fake.models()
    asleep = tuple(attrs.evolve(info, name=name, status="unloaded") for name in (info.name, "other"))
    monkeypatch.setattr(fake, "models", lambda: asleep, raising=False)
    props = http.send("/props").json
    assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 3, False)
    assert (props["is_sleeping"], props["model_path"]) == (True, "demo.gguf")
    reply = http.chat()
    assert (reply.status, fake.pins) == (400, set())
    assert "POST /models/load" in reply.json["error"]["message"]
    assert http.send("/models/load", {"model": info.name}).status == 200
    monkeypatch.setattr(fake, "models", lambda: (info,), raising=False)
    assert http.chat().status == 200
    assert "role" not in http.send("/props").json


def test_properties_wake_no_model_that_sleeps(serve, fake, monkeypatch) -> None:
    http, infos = serve(), fake.models()
    asleep = tuple(attrs.evolve(info, status="sleeping") for info in infos)
    monkeypatch.setattr(fake, "models", lambda: asleep, raising=False)
    assert http.send("/props").json["is_sleeping"] is True
    assert not fake.pins


def test_properties_of_a_model_keep_it_asleep(serve, fake, monkeypatch) -> None:
    http, infos = serve(), fake.models()
    awake = http.send("/props").json
    assert awake["is_sleeping"] is False
    wait_for(lambda: not fake.pins)
    asleep = tuple(attrs.evolve(info, status="unloaded", fingerprint="") for info in infos)
    monkeypatch.setattr(fake, "models", lambda: asleep, raising=False)
    monkeypatch.setattr(fake, "pin", None, raising=False)
    assert http.send("/props").json == {**awake, "is_sleeping": True}
    assert [one["status"]["value"] for one in http.send("/v1/models").json["data"]] == ["unloaded"]
