import pytest


def test_models(http) -> None:
    with http.openai() as client:
        models = client.models.list().data
        assert [(model.id, model.owned_by) for model in models] == [("demo", "llamacli")]
        assert client.models.retrieve("demo").id == "demo"
    assert http.send("/v1/models").json["data"][0]["meta"]["n_vocab"] == 2048


@pytest.mark.parametrize("name", ["other", "a/b", ""])
def test_unknown_models(name: str, http) -> None:
    assert http.send(f"/v1/models/{name}").status == 404
