from pathlib import Path

import pytest

from llamacli import InvalidRequestError
from llamacli.chat.functions import call
from llamacli.chat.messages import ToolCall
from llamacli.cli.functions import load_functions


def test_public_functions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("from os.path import join\ndef a(x: int): return x + 1\ndef _b(): ...\n")
    functions = load_functions(str(path))
    assert list(functions) == ["a"]
    assert call(functions, ToolCall("a", {"x": 1})) == 2


@pytest.mark.parametrize(
    ("source", "said"),
    [("x = 1", "defines no function"), ("1/0", "ZeroDivisionError"), ("def a(x): ...", "needs a type")],
)
def test_files_without_tools_are_errors(source: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(source)
    with pytest.raises(InvalidRequestError, match=said):
        load_functions(str(tmp_path / "tools.py"))
    with pytest.raises(FileNotFoundError):
        load_functions(str(tmp_path / "nowhere.py"))
