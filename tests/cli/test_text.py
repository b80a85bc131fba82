from pathlib import Path

import pytest

from llamacli import InvalidRequestError
from llamacli.cli.text import read_file, unescaped, words


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (r"a\nb", "a\nb"),
        (r"a\\nb", r"a\nb"),
        (r"\t\r\'\"", "\t\r'\""),
        (r"\x41\xe2\x82\xac", "A€"),
        (r"C:\dir\x4", r"C:\dir\x4"),
        ("a\\", "a\\"),
    ],
)
def test_escapes_as_in_llama_cpp(text: str, meant: str) -> None:
    assert unescaped(text) == meant


def test_escapes_that_are_not_utf8() -> None:
    with pytest.raises(InvalidRequestError, match=r"\\xff is not UTF-8"):
        unescaped(r"a\xff")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a b", ["a", "b"]),
        ("'User: ' \"\\n\"", ["User: ", "\\n"]),
        ('""', [""]),
        ("#a it;s", ["#a", "it;s"]),
    ],
)
def test_words_may_be_quoted(line: str, expected: list[str]) -> None:
    assert words(line) == expected


def test_open_quotation_mark() -> None:
    with pytest.raises(InvalidRequestError, match="it's has a quotation mark without its second"):
        words("it's")


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\x0a\0\0\0WEBPVP8 "])
def test_images_are_no_text(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(data)
    with pytest.raises(
        InvalidRequestError, match=r"picture is an image: --image shows it to the model, or /image in a chat$"
    ):
        read_file(path)


def test_files_without_end_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"^/dev/zero is larger than 256 MiB, the most that is read$"):
        read_file(Path("/dev/zero"))
    monkeypatch.setattr("llamacli.cli.text.MAX_TEXT_BYTES", 3)
    (tmp_path / "fits").write_bytes(b"abc")
    assert read_file(tmp_path / "fits") == "abc"
    (tmp_path / "long").write_bytes(b"abcd")
    with pytest.raises(InvalidRequestError, match="long is larger"):
        read_file(tmp_path / "long")
