"""Multi-token-prediction heads (MTP, NextN): parts of `Architecture.nextn`.

arXiv:2412.19437, section 2.2: a block of the model's own kind predicts the token after the next one, from the embedding
of the next token and the hidden state of the present one. The concatenation has the embedding first. The hidden state
is the one after the final norm, which the output layer reads, and what a head passes on is that after its own last
norm, as in vLLM (since its pull request 45895) and SGLang. As in llama.cpp, a token keeps its own position.
"""

from __future__ import annotations

from llamacli.architecture import Config
from llamacli.graph import Graph, Param, Value
from llamacli.tensor_table import Params, TensorTable, Weights


def add_nextn(block: TensorTable, c: Config) -> None:
    """Add the tensors of a head, beside those of its block.

    Files may leave out the norm and the two matrices that the model has itself.
    """
    block.add("nextn.eh_proj", c.n_embd, 2 * c.n_embd)
    block.add("nextn.enorm", c.n_embd)
    block.add("nextn.hnorm", c.n_embd)
    block.add("nextn.shared_head_norm", c.n_embd, optional=True)
    block.add("nextn.embed_tokens", c.n_vocab, c.n_embd, optional=True)
    block.add("nextn.shared_head_head", c.n_vocab, c.n_embd, optional=True)


def nextn_input(g: Graph, c: Config, weights: Weights, block: Params) -> Value:
    """Input of a head's block: embedding and previous hidden state, normed, projected."""
    embedding = g.rms_norm(g.embed(block.nextn_embed_tokens or weights.token_embd), block.nextn_enorm, c.rms_eps)
    hidden = g.rms_norm(g.previous_hidden(c.n_embd), block.nextn_hnorm, c.rms_eps)
    return g.linear(g.concat(embedding, hidden), block.nextn_eh_proj)


def nextn_logits(g: Graph, c: Config, weights: Weights, block: Params, x: Value, norm: Param | None = None) -> Value:
    """Logits of a head from its block's output; `norm` replaces its norm."""
    norm = norm or block.nextn_shared_head_norm or weights.output_norm
    return g.linear(
        g.rms_norm(x, norm, c.rms_eps), block.nextn_shared_head_head or weights.output or weights.token_embd
    )
