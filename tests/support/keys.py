"""Keys that the tests of the page press, with WebDriver's codes."""

from __future__ import annotations


class Keys:
    """Codes of keys; NULL releases those that are held."""

    NULL = "\ue000"
    TAB = "\ue004"
    ENTER = "\ue007"
    SHIFT = "\ue008"
    CONTROL = "\ue009"
    ALT = "\ue00a"
    ESCAPE = "\ue00c"
    ARROW_RIGHT = "\ue014"
