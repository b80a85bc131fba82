"""Reference of the verbs, made from their docstrings."""

from pathlib import Path

import pytest

from llamacli.graph import Graph
from verb_reference import FIELDS, described, reference, users, verbs

PAGE = Path(__file__).parents[1] / "docs" / "verbs.md"


def test_verb_reference_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "PYTHONPATH=tests/support python -m verb_reference"


@pytest.mark.parametrize("name", verbs())
def test_every_verb_has_formula_shapes_limits_and_example(name: str) -> None:
    prose, fields = described(verbs()[name])
    assert prose
    assert list(fields) == list(FIELDS)
    assert f"g.{name}(" in fields["Example"] or name == "add", "an example calls the verb"


def test_docstrings_without_fields_are_named() -> None:
    def verb(g: Graph) -> None:
        """Do nothing.

        Formula: `out = x`
        """

    with pytest.raises(ValueError, match="docstring of verb ends in"):
        described(verb)


@pytest.mark.medium
def test_users_are_found() -> None:
    found = users()
    assert found["xielu"] == {"apertus"}
    assert found["positions"] == {"bert", "gpt2", "mpt", "starcoder"}
    assert "llama" in found["rms_norm"]
    assert "gpt2" not in found["rms_norm"]
