"""Samplers, grammars and log-probabilities: the next token from logits."""

from llamacli.util.exports import exports

_MODULE_OF, __getattr__, __dir__ = exports(__name__, __file__)

__all__ = list(_MODULE_OF)
