"""Checks of MiniMax-Text-01.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import pytest

from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli_minimax.lightning import MiniMax01
from llamacli_minimax.m3 import MiniMaxM3
from tiny_lightning import INERT, VARIANTS


@parametrize_with_checks([MiniMax01(), MiniMaxM3()], VARIANTS, slow=pytest.mark.slow, inert=INERT)
def test_architecture(check: Check) -> None:
    check()
