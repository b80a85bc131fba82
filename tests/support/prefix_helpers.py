"""Texts and configuration of the prefix session tests."""

from llamacli.prefix import PrefixConfig

PREFIX, OTHER, SUFFIX = "once upon a time", "once upon me", " there once"
CONFIG = PrefixConfig(n_ctx=128, n_batch=4)
