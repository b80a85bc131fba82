"""Models: the generated page, README's table, and the names of llama.cpp."""

from llamacli.plugins import known_architectures
from llamacli.tools.supported import reasons
from model_reference import PAGE, README, page, peer_names, readme

COMMAND = "PYTHONPATH=tests/support python -m model_reference"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), COMMAND


def test_readme_lists_the_models() -> None:
    assert README.read_text("utf-8") == readme(), COMMAND


def test_every_name_of_the_peer_runs_or_has_a_reason() -> None:
    _, names = peer_names()
    assert len(names) == len(set(names)) == 154
    assert set(names) - known_architectures().keys() == reasons().keys()


def test_every_architecture_has_models() -> None:
    assert [name for name, known in known_architectures().items() if not known["models"]] == []
