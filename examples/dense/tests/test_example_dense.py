"""Checks of ExampleDense: files, invalid files, results."""

from llamacli.testing import parametrize_with_checks
from llamacli_example_dense import ExampleDense
from llamacli_example_dense.tiny import VARIANTS


@parametrize_with_checks([ExampleDense()], VARIANTS)
def test_architecture(check):
    check()
