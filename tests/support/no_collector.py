"""Pytest plugin: run without Python's collector of reference cycles."""

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Switch the collector off; tests may still call `gc.collect`."""
    gc.disable()
