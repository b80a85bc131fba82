"""Engines: what compiles a recorded graph and runs it on tokens."""

from llamacli.engine.base import Engine, Program, QuantMode
from llamacli.engine.reference import ReferenceEngine


def default_engine(threads: int | None = None) -> Engine:
    """The fastest engine that runs here."""
    return ReferenceEngine()


__all__ = ["Engine", "Program", "QuantMode", "ReferenceEngine", "default_engine"]
