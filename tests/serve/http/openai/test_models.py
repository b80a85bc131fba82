import datetime

import pytest


def test_models(http) -> None:
    with http.openai() as client:
        models = client.models.list().data
        assert [(model.id, model.owned_by) for model in models] == [("demo", "llamacli")]
        assert client.models.retrieve("demo").id == "demo"
    assert http.send("/v1/models").json["data"][0]["meta"]["n_vocab"] == 2048


def test_models_for_clients_of_anthropic(http) -> None:
    page = http.send("/v1/models", headers={"anthropic-version": "2023-06-01"}).json
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "demo", "demo")
    model = http.send("/v1/models/demo", headers={"anthropic-version": "2023-06-01"}).json
    assert model == page["data"][0]
    assert (model["type"], model["display_name"], model["lifecycle"]) == ("model", "demo", "active")
    assert datetime.datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert http.send("/v1/models/demo").json.keys() & {"type", "created_at"} == set()


@pytest.mark.parametrize("name", ["other", "a/b", ""])
def test_unknown_models(name: str, http) -> None:
    assert http.send(f"/v1/models/{name}").status == 404
