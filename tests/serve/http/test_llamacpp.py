"""Native endpoints of llama-server."""

from typing import Any

import numpy as np
import pytest

from http_server import wait_for
from llamacli.serve.requests import (
    Admitted,
    Done,
    EmbeddingRequest,
    Finished,
    PromptProgress,
    TextDelta,
    Timings,
    TokenLogprob,
    TokenTimings,
    Usage,
)
from llamacli.serve.requests import Embedding as Vector

HI = [{"role": "user", "content": "hi"}]
TOKENS = [TokenLogprob(7, b"one", -0.5, ((7, b"one", -0.5), (8, b"two", -1.5))), TokenLogprob(9, b"\n", -0.25, ())]


def script(request: Any) -> list:
    """Two tokens for each choice."""
    n = request.n * len(request.prompts)
    deltas = [TextDelta(i, one.piece.decode(), tokens=(one,)) for one in TOKENS for i in range(n)]
    ends = [Finished(i, "stop", "X") for i in range(n)]
    n_prompt = sum(map(len, request.prompts))
    return [Admitted(0.0), *deltas, *ends, Done(Usage(n_prompt, 1, 2 * n), Timings(0.0, 0.1, 0.2))]


def post(http, path: str = "/completion", **fields) -> Any:
    return http.send(path, {"prompt": "Once", "seed": 3, **fields})


def test_completion(http, fake) -> None:
    fake.script = script
    body = post(http, temperature=0.25, logit_bias=[[5, False]]).json
    (request,) = fake.requests
    n = len(request.prompts[0])
    assert (request.max_tokens, request.params.temperature) == (None, 0.25)
    expected = {"content": "one\n", "tokens": [], "stop": True, "stop_type": "word", "stopping_word": "X"}
    assert {name: body[name] for name in expected} == expected
    assert body["has_new_line"]
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["truncated"]) == (2, n, False)
    settings = body["generation_settings"]
    assert (settings["seed"], settings["n_predict"], settings["temperature"]) == (3, -1, 0.25)
    assert settings["logit_bias"] == [{"token": 5, "bias": None}]
    assert body["prompt"] == "<|begin|>Once"
    assert body["timings"]["predicted_per_token_ms"] == 200  # the first token is the prompt's
    assert "completion_probabilities" not in body
    assert post(http, return_tokens=True).json["tokens"] == [7, 9]


@pytest.mark.parametrize("given", [None, {"5": -1.0}, [[5, -1.0]]])
def test_ignored_ends_are_forbidden(http, fake, demo, given) -> None:
    """As by llama-server; in OpenAI's API a text goes on behind them."""
    fake.script = script
    biases = post(http, ignore_eos=True, logit_bias=given).json["generation_settings"]["logit_bias"]
    expected = dict.fromkeys(demo.tokenizer.eog_ids) | ({} if given is None else {5: -1.0})
    assert {one["token"]: one["bias"] for one in biases} == expected
    post(http, "/v1/completions", ignore_eos=True)
    assert not fake.requests[-1].params.logit_bias


def test_a_text_that_fills_the_context_is_truncated(http, fake) -> None:
    for n_prompt, expected in ((1020, False), (1021, True)):
        done = Done(Usage(n_prompt, 0, 3), Timings(0.0, 0.0, 0.0))
        fake.script = lambda _, done=done: [Admitted(0.0), TextDelta(0, "x"), Finished(0, "length"), done]
        assert post(http).json["truncated"] is expected


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_ends(reason: str, http, fake) -> None:
    done = Done(Usage(1), Timings(0.0, 0.0, 0.0))
    fake.script = lambda _: [Admitted(0.0), Finished(0, reason), done]
    assert post(http, n_predict=0).json["stop_type"] == {"stop": "eos", "length": "limit"}[reason]
    assert fake.requests[0].max_tokens == 0


def test_several_prompts_and_probabilities(http, fake) -> None:
    fake.script = script
    prompts = [[5, 6, 7], "Once", {"prompt_string": "Once"}]
    found = post(http, prompt=prompts, n_probs=1, return_tokens=True).json
    assert [(one["index"], one["tokens"], one["tokens_predicted"]) for one in found] == [
        (i, [7, 9], 2) for i in range(3)
    ]  # fmt: skip
    assert fake.requests[0].prompts[1] == fake.requests[0].prompts[2] != (5, 6, 7)
    (first, _) = found[0]["completion_probabilities"]
    assert (first["id"], first["token"], first["bytes"], first["logprob"]) == (7, "one", [*b"one"], -0.5)
    assert first["top_logprobs"] == [{"id": 7, "token": "one", "bytes": [*b"one"], "logprob": -0.5}]
    mixed = post(http, prompt=[5, " Once", 6])
    assert isinstance(mixed.json, dict)
    special = fake._model.tokenizer.encode(" Once", add_special=False)
    assert fake.requests[-1].prompts == ((5, *special, 6),)


def test_stream(http, fake) -> None:
    progress = PromptProgress(4, 1, 4, 0.1)
    fake.script = lambda request: [Admitted(0.0), progress, *script(request)[1:]]
    reply = post(http, "/completions", stream=True, n_probs=1, return_progress=True)
    first, *deltas, last = reply.events
    assert b"[DONE]" not in reply.body
    assert first["prompt_progress"]["processed"] == 4
    assert [(one["content"], one["tokens"], one["stop"], one["tokens_predicted"]) for one in deltas] == [
        ("one", [7], False, 1), ("\n", [9], False, 2)
    ]  # fmt: skip
    assert len(deltas[0]["completion_probabilities"]) == 1
    assert (last["content"], last["stop"], last["has_new_line"], last["tokens"]) == ("", True, True, [])
    assert "completion_probabilities" not in last


def test_times_of_each_token(http, fake) -> None:
    times = [TokenTimings(Usage(4, 1, n), Timings(0.0, 0.5, 0.25 * (n - 1))) for n in (1, 2)]
    pairs = zip(times, TOKENS, strict=True)
    texts = [[one, TextDelta(0, token.piece.decode(), tokens=(token,))] for one, token in pairs]
    progress = [PromptProgress(4, 1, 1, 0.0), PromptProgress(4, 1, 4, 0.5)]
    fake.script = lambda request: [Admitted(0.0), *progress, *texts[0], *texts[1], *script(request)[3:]]
    first, second, *deltas, last = post(http, stream=True, timings_per_token=True, return_progress=True).events
    assert [one["prompt_progress"]["processed"] for one in (first, second)] == [1, 4]
    assert [(one["timings"]["prompt_n"], one["timings"]["prompt_ms"]) for one in (first, second)] == [(0, 0), (3, 500)]
    assert [(one["timings"]["predicted_n"], one["timings"]["predicted_per_second"]) for one in deltas] == [
        (1, 0.0), (2, 4.0)
    ]  # fmt: skip
    assert last["timings"]["predicted_ms"] == 200
    assert fake.requests[0].timed
    post(http, timings_per_token=True)
    assert not fake.requests[1].timed


def test_fields_of_the_response(http) -> None:
    body = post(http, response_fields=["content", "generation_settings/seed", "nothing/here"]).json
    assert body == {"content": "one two three", "generation_settings/seed": 3}


def test_special_tokens_of_prompts(http, fake) -> None:
    tokenizer = fake._model.tokenizer
    special = next(token for token in tokenizer.special_ids if tokenizer.is_control(token))
    text = f"a{tokenizer.token_text(special)}b"
    for parse, expected in ((None, True), (False, False)):
        post(http, prompt=text, parse_special=parse)
        assert (special in fake.requests.pop().prompts[0][1:]) is expected


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, 400),
        ("/completion", {"prompt": []}, 400),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, 501),
        ("/embedding", {}, 400),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, 501),
        ("/props", {"temperature": 1}, 501),
        ("/slots/0?action=save", {}, 501),
        ("/models/load", {"model": "other"}, 404),
    ],
)
def test_refused(path: str, fields: dict, status: int, http, fake) -> None:
    reply = http.send(path, fields)
    assert (reply.status, "message" in reply.json["error"]) == (status, True)
    assert not fake.requests


class TestInfill:
    @pytest.fixture(autouse=True)
    def infill_tokens(self, fake, monkeypatch) -> None:
        monkeypatch.setattr(fake._model.tokenizer, "infill_ids", (4, 5, 6))

    def send(self, http, **fields) -> Any:
        return http.send("/infill", {"input_prefix": "int ", "prompt": "x", "input_suffix": ";", **fields})

    def test_prompt(self, http, fake) -> None:
        assert self.send(http).json["content"] == "one two three"
        tokenizer = fake._model.tokenizer
        assert fake.requests[0].prompts == (tuple(tokenizer.encode_infill("int x", ";")),)

    def test_fields_of_editors(self, http, fake) -> None:
        self.send(http, id_slot=0, n_predict=128, n_indent=4)
        assert (fake.requests[0].max_tokens, fake.requests[0].min_indent, fake.requests[0].slot) == (128, 4, 0)

    def test_other_files(self, http, fake, monkeypatch) -> None:
        tokenizer = fake._model.tokenizer
        extra = [{"filename": "a.h", "text": "int y;"}]
        self.send(http, input_extra=extra)
        ids = fake.requests.pop().prompts[0]
        assert tokenizer.decode(ids).startswith("\n\n--- snippet ---\n\nint y;")
        monkeypatch.setattr(tokenizer, "_repository", 7)
        monkeypatch.setattr(tokenizer, "_file", 8)
        self.send(http, input_extra=extra)
        ids = fake.requests.pop().prompts[0]
        assert (ids[0], ids.count(8)) == (7, 2)
        assert "a.h\nint y;" in tokenizer.decode(ids)
        long = [{"filename": "a.h", "text": "int y; " * 5000}]
        self.send(http, input_extra=long, n_predict=24)
        ids = fake.requests.pop().prompts[0]
        assert (len(ids), ids[-1]) == (1000, 6)

    @pytest.mark.parametrize("extra", [{}, {"filename": "a"}, {"filename": 1, "text": "a"}])
    def test_wrong_files(self, extra: dict, http) -> None:
        assert self.send(http, input_extra=[extra]).status == 400


def test_embeddings(http, fake, monkeypatch) -> None:
    import attrs

    infos = fake.models()
    monkeypatch.setattr(fake, "models", lambda: (attrs.evolve(infos[0], embeds=True),), raising=False)

    def vectors(request: EmbeddingRequest) -> list:
        made = [Vector(i, np.full(3, len(one), np.float32)) for i, one in enumerate(request.prompts)]
        return [Admitted(0.0), *made, Done(Usage(9), Timings(0.0, 0.0, 0.0))]

    fake.script = vectors
    for path, name in (("/embedding", "content"), ("/embeddings", "input")):
        reply = http.send(path, {name: [[5, 6], [7]]})
        assert reply.json == [{"index": 0, "embedding": [[2.0] * 3]}, {"index": 1, "embedding": [[1.0] * 3]}]


def test_counts_of_tokens(http, fake) -> None:
    http.chat()
    n = len(fake.requests[0].prompts[0])
    for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/responses", {"input": "hi"})):
        found = http.send(f"{path}/input_tokens", body).json
        assert found == {"object": "response.input_tokens", "input_tokens": n}
    long = {"messages": [{"role": "user", "content": "a b " * 3000}]}
    assert http.send("/v1/chat/completions/input_tokens", long).json["input_tokens"] > 1024
    assert http.send("/apply-template", long).json["n_tokens"] > 1024


def test_models_are_loaded_and_unloaded(http, fake) -> None:
    assert http.send("/models/load", {"model": "demo"}).json == {"success": True}
    assert http.send("/models/unload", {"model": "demo"}).json == {"success": True}
    assert fake.unloaded == ["demo"]
    wait_for(lambda: not fake.pins)


def test_a_last_message_of_the_assistant_is_continued(http) -> None:
    begun = [*HI, {"role": "assistant", "content": "So"}]
    assert http.send("/apply-template", {"messages": begun}).json["prompt"].endswith("<assistant>So")
    parts = [{"type": "text", "text": text} for text in ("", "So", "", "on")]
    whole = {"messages": [*HI, {"role": "assistant", "content": parts}]}
    assert http.send("/apply-template", whole).json["prompt"].endswith("<assistant>So\n\n\n\non")
    echoed = http.send("/v1/chat/completions", {**whole, "continue_final_message": True, "echo": True}).json["choices"][
        0
    ]["message"]["content"]
    assert echoed.startswith("So\n\n\n\non")
    new = {"messages": begun, "add_generation_prompt": True}
    assert http.send("/apply-template", new).json["prompt"].endswith("<assistant>So\n<assistant>")
    assert http.send("/apply-template", {"messages": [*begun, begun[-1]]}).status == 400


def test_properties_are_defaults_of_later_requests(serve, fake) -> None:
    http = serve(props=True, sampling={"top_k": 7}, seed=3)
    before = http.send("/v1/completions", {"prompt": "a"}).json["system_fingerprint"]
    assert http.send("/props", {"temperature": 0.25, "seed": 5, "max_tokens": 9}).json == {"success": True}
    http.send("/completion", {"prompt": "a", "top_p": 0.5})
    request = fake.requests[-1]
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0.25, 7, 0.5)
    assert (request.seed, request.max_tokens) == (5, 9)
    params = http.send("/props").json["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_k"], params["seed"]) == (0.25, 7, 5)
    assert http.send("/v1/completions", {"prompt": "a"}).json["system_fingerprint"] != before
    http.send("/props", {"seed": -1, "max_tokens": -1})
    seeds = {http.send("/completion", {"prompt": "a"}).json["generation_settings"]["seed"] for _ in range(3)}
    assert (len(seeds), fake.requests[-1].max_tokens) == (3, None)
    assert http.send("/props", {"temperature": "hot"}).json["error"]["param"] == "temperature"


def test_probabilities_by_which_tokens_were_drawn(http, fake) -> None:
    fake.script = script
    (first, second) = post(http, n_probs=2, post_sampling_probs=True).json["completion_probabilities"]
    assert fake.requests[0].params.post_sampling_probs
    assert (first["prob"], [one["prob"] for one in first["top_probs"]]) == (
        pytest.approx(np.exp(-0.5)), pytest.approx([np.exp(-0.5), np.exp(-1.5)])
    )  # fmt: skip
    assert not {"logprob", "top_logprobs"} & {*first, *second}
    assert http.send("/v1/completions", {"prompt": "a", "post_sampling_probs": True}).status == 400
    post(http, n_indent=4)
    assert fake.requests[-1].min_indent == 4


class TestSlots:
    @pytest.fixture
    def slots(self, serve, fake, tmp_path):
        """Server whose actions on slots are `calls`."""

        class Recorder:
            calls: list[Any] = []  # noqa: RUF012 - one test's

            def save(self, *given: Any) -> tuple[int, int]:
                self.calls.append(given)
                return 3, 99

            restore = save

            def erase(self, slot: int) -> int:
                return slot + 1

        recorder = Recorder()
        recorder.calls = []
        fake.slots = lambda name: recorder
        yield serve(slot_folder=tmp_path), recorder.calls, tmp_path
        del fake.slots

    def test_actions(self, slots) -> None:
        http, calls, folder = slots
        body = {"filename": "my chat.bin"}
        saved = http.send("/slots/1?action=save", body).json
        assert (saved["id_slot"], saved["n_saved"], saved["n_written"]) == (1, 3, 99)
        restored = http.send("/slots/2?action=restore&model=demo", body).json
        assert (restored["id_slot"], restored["n_restored"], restored["n_read"]) == (2, 3, 99)
        assert calls == [(1, folder / "my chat.bin"), (2, folder / "my chat.bin")]
        assert http.send("/slots/1?action=erase", method="POST").json == {"id_slot": 1, "n_erased": 2}

    @pytest.mark.parametrize(
        "name", ["", "..", "../a", "/etc/passwd", "a/b", "a\\b", "a\0b", ".hidden", "a" * 300, None, 5]
    )
    def test_names_outside_of_the_folder_are_refused(self, name: Any, slots) -> None:
        http, calls, _ = slots
        for action in ("save", "restore"):
            reply = http.send(f"/slots/1?action={action}", {"filename": name})
            assert (reply.status, reply.json["error"]["param"]) == (400, "filename")
        assert not calls

    def test_links_out_of_the_folder_are_refused(self, slots, tmp_path_factory) -> None:
        http, calls, folder = slots
        (folder / "link.bin").symlink_to(tmp_path_factory.mktemp("outside") / "state.bin")
        for action in ("save", "restore"):
            reply = http.send(f"/slots/1?action={action}", {"filename": "link.bin"})
            assert (reply.status, reply.json["error"]["message"]) == (400, "filename: link.bin is a link")
        assert not calls

    @pytest.mark.parametrize(
        "path", ["/slots/x?action=save", "/slots/256?action=save", "/slots/1?action=x", "/slots/1"]
    )
    def test_wrong_slots_and_actions(self, path: str, slots) -> None:
        assert slots[0].send(path, {"filename": "a"}).status == 400

    def test_numbers_of_requests(self, slots, fake) -> None:
        http = slots[0]
        for given, found in ((7, 7), (-1, None), (None, None)):
            assert post(http, id_slot=given).json["id_slot"] == (-1 if found is None else found)
            assert fake.requests.pop().slot == found
        assert post(http, id_slot=256).status == 400
