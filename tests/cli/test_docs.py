from pathlib import Path

from llamacli.cli.docs import reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_says_what_the_commands_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "python -m llamacli.cli.docs > docs/cli.md"
