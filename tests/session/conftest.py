import pytest

from conftest import LoadTiny
from llamacli import Model, Session


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa")


@pytest.fixture
def session(model: Model) -> Session:
    return model.create_session()


@pytest.fixture
def text_model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa", tokenizer="spm")
