import json

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
