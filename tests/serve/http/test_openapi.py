import json

import pytest

from llamacli.serve.http.openapi import description
from llamacli.serve.http.routes import ROUTES, loaded


def test_every_route_is_described(http) -> None:
    document = http.send("/openapi.json").json
    assert document == json.loads(json.dumps(description(ROUTES)))
    for route in ROUTES:
        for path in route.paths:
            operation = document["paths"][path.replace(":path", "")][route.method.lower()]
            assert operation["summary"]
            assert ("requestBody" in operation) == (loaded(route.handler)[1] is not None)
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)


def test_references_are_resolved() -> None:
    document = description(ROUTES)

    def walk(value) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                target = document
                for part in value["$ref"].removeprefix("#/").split("/"):
                    target = target[part]
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(document)
    messages = document["components"]["schemas"]["ChatRequest"]["properties"]["messages"]
    assert messages["minItems"] == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/api/chat"])
def test_errors_are_as_described(http, path) -> None:
    described = http.send("/openapi.json").json
    reference = described["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["schema"][
        "$ref"
    ]
    schema = described["components"]["schemas"][reference.rpartition("/")[2]]
    error = http.send(path, b"\0").json
    assert set(schema["required"]) <= error.keys()
    inner = schema["properties"]["error"]
    if inner["type"] == "object":
        assert set(inner["required"]) <= error["error"].keys() <= inner["properties"].keys()
    else:
        assert isinstance(error["error"], str)


def test_empty_response_is_described(http) -> None:
    described = http.send("/openapi.json").json["paths"]["/v1/stream"]["delete"]["responses"]
    assert described["204"] == {"description": "Success."}
    reply = http.send("/v1/stream?conv_id=x", method="DELETE")
    assert (reply.status, reply.headers.keys() & {"content-type", "content-length"}) == (204, set())
