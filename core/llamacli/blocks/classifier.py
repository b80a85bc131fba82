"""Classifier heads of rerankers: parts of `Architecture.classifier`.

As llama.cpp's pooling of type rank: a dense layer with an activation and perhaps a norm, then an output layer with a
row for each class. Files have both layers or one of them.
"""

from __future__ import annotations

from llamacli.architecture import Config
from llamacli.errors import ModelFormatError
from llamacli.graph import Graph, Value
from llamacli.ops.activations import Formula, tanh
from llamacli.tensor_table import TensorTable, Weights


def add_classifier(table: TensorTable, c: Config) -> None:
    """Add the optional tensors of a head: `cls`, `cls.norm`, `cls.output`."""
    n_labels = max(1, len(c.labels))
    table.add("cls", c.n_embd, c.n_embd, optional=True, bias=True, other=(n_labels, c.n_embd))
    table.add("cls.norm", c.n_embd, optional=True, only_with="cls")
    table.add("cls.output", n_labels, c.n_embd, optional=True, bias=True)


def classifier_scores(
    g: Graph, c: Config, weights: Weights, activation: Formula = tanh, eps: float = 0.0
) -> Value | None:
    """Record a classifier head, None for a file without one.

    Its result is a score for each class.
    `eps` is that of its norm. Raises ModelFormatError for a dense layer without the output layer that it needs.
    """
    w, n_labels = weights, max(1, len(c.labels))
    if not w.cls and not w.cls_output:
        return None
    x = g.previous_hidden(c.n_embd)
    if w.cls:
        x = g.map(g.linear(x, w.cls), activation)
        x = g.layer_norm(x, w.cls_norm, eps) if w.cls_norm else x
    if w.cls_output:
        return g.linear(x, w.cls_output)
    if x.width != n_labels:
        raise ModelFormatError(
            f"tensor cls.weight has {x.width} rows for {n_labels} classes, and there is no cls.output"
        )
    return x
