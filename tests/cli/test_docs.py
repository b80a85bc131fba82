from pathlib import Path

from llamacli.cli.docs import reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_cli_reference_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "python -m llamacli.cli.docs > docs/cli.md"
