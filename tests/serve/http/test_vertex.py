"""Envelope of Vertex AI."""

from llamacli.serve.requests import GenerationRequest

HI = [{"role": "user", "content": "hi"}]


def test_each_instance_has_its_result_or_error(http, fake) -> None:
    instances = [
        {"@requestFormat": "chatCompletions", "messages": HI, "max_tokens": 3, "seed": 7},
        {"@requestFormat": "completions", "prompt": []},
        {"@requestFormat": "images", "prompt": "x"},
        {"prompt": "x"},
        {"@requestFormat": "completions", "prompt": "Once", "stream": True},
    ]
    reply = http.send("/predict", {"instances": instances})
    assert reply.status == 200
    chat, wrong, unknown, without, stream = reply.json["predictions"]
    assert chat["choices"][0]["message"]["role"] == "assistant"
    (request,) = [one for one in fake.requests if isinstance(one, GenerationRequest)][:1]
    assert (request.seed, request.max_tokens) == (7, 3)
    assert wrong["error"]["param"] == "prompt"
    assert unknown["error"]["param"] == "instances[2].@requestFormat"
    assert without["error"]["param"] == "instances[3].@requestFormat"
    assert stream["error"]["param"] == "instances[4].stream"


def test_wrong_envelopes(http) -> None:
    for body in ({}, {"instances": []}, {"instances": [1]}, {"instances": [{}] * 129}):
        assert http.send("/predict", body).status == 400


def test_keys_hold_for_instances(serve) -> None:
    server = serve(api_keys=("k",))
    body = {"instances": [{"@requestFormat": "completions", "prompt": "Once"}]}
    assert server.send("/predict", body).status == 401
    reply = server.send("/predict", body, {"authorization": "Bearer k"})
    assert reply.json["predictions"][0]["object"] == "text_completion"
