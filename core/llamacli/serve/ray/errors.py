"""Errors of clusters and replicas."""

from __future__ import annotations

from llamacli.errors import LlamaCliError


class ClusterError(LlamaCliError):
    """The cluster cannot be reached, or cannot run the replicas."""


class MismatchError(ClusterError):
    """A node has another version of this package, or another model."""
