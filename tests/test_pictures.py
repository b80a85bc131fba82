"""Pictures of the README and the scripts that draw them."""

import re
from pathlib import Path

import pytest

from draw_probabilities import colour, visible
from measurements import CHARTED, RESULTS, filled, result, speeds, table

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
MAX_BYTES = 100_000


def test_pictures_are_small_and_need_no_other_file() -> None:
    found = sorted(PICTURES.glob("*.svg"))
    assert [path.stem for path in found] == ["probabilities", "speeds", "terminal"]
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert len(text) < MAX_BYTES
        assert not re.search(r"<script|<image|@import|url\(http", text)


def test_speeds_are_those_of_the_results() -> None:
    rows = speeds(CHARTED)
    assert len(rows) >= 14
    picture = (PICTURES / "speeds.svg").read_text(encoding="utf-8")
    for row in rows:
        assert row.task in picture, "python tools/measurements.py"
        assert f"{row.ratio:g}   ({row.ours:g} and {row.theirs:g} tok/s)" in picture, "python tools/measurements.py"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_name_machine_and_commit(path: Path) -> None:
    found = result(path.stem)
    assert re.fullmatch("[0-9a-f]{40}", found["commit"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
    assert all(found[key] for key in ("title", "machine", "command"))
    assert not re.search(r"/(home|root|tmp|work)/", path.read_text(encoding="utf-8"))
    assert {len(row) for row in found["rows"]} == {len(found["columns"])}


def test_table_of_a_result() -> None:
    found = {"columns": ["task", "ratio"], "rows": [["prompt", 1.5], ["generate", 2]]}
    assert table(found) == "| task | ratio |\n| --- | ---: |\n| prompt | 1.5 |\n| generate | 2 |\n"


def test_tables_replace_old_ones() -> None:
    assert filled("performance.md").count("| prompt 4096, 1B Q8_0 |") == 1


def test_probable_tokens_are_white() -> None:
    assert (colour(1.0), colour(0.0)) == ("hsl(8 85% 100%)", "hsl(8 85% 60%)")
    assert [visible(text) for text in (" fox", "\n", " ")] == ["fox", "⏎", "␣"]


def test_terminal_rows_are_visible_while_they_last() -> None:
    pytest.importorskip("pyte")
    from record_terminal import Version, drawn

    picture = drawn([Version(0, "$ a", 0.0, 1.0), Version(0, "$ ab", 1.0, None)], 4.0)
    assert "@keyframes k0{0%{visibility:hidden}0.00%{visibility:visible}25.00%,to{visibility:hidden}}" in picture
    assert "@keyframes k1{0%{visibility:hidden}25.00%{visibility:visible}to{}}" in picture
    assert '<text id="t0" class="a h" x="16" y="30">$ a</text>' in picture
    assert '<text id="t1" class="a" x="16" y="30">$ ab</text>' in picture
