"""Checks of ExampleHybrid: files, invalid files, results."""

from llamacli.testing import parametrize_with_checks
from llamacli_example_hybrid import ExampleHybrid
from llamacli_example_hybrid.tiny import VARIANTS


@parametrize_with_checks([ExampleHybrid()], VARIANTS)
def test_architecture(check):
    check()
