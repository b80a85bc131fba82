"""Mamba and Mamba-2: state space layers without attention."""

from typing import Any

import attrs

from llamacli.plugin import Architecture, Config, Duality, Graph, Metadata, SelectiveScan, TensorTable, Value, Weights


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class MambaConfig(Config):
    """Hyperparameters of Mamba or Mamba-2."""

    sizes: SelectiveScan | Duality


class Mamba(Architecture):
    """`general.architecture = mamba`: Mamba and Falcon-Mamba."""

    name = "mamba"

    def configure(self, metadata: Metadata) -> MambaConfig:
        """Read the hyperparameters; files count 0 heads of attention."""
        for key in ("attention.head_count", "feed_forward_length"):
            metadata.get_int(f"{self.name}.{key}", default=0, minimum=0)
        no_attention = {"n_head": 1, "n_head_kv": 1, "head_dim": 1, "n_ff": 0}
        return MambaConfig.from_gguf(metadata, sizes=self.read_sizes(metadata), **no_attention)

    def read_sizes(self, metadata: Metadata) -> SelectiveScan | Duality:
        """Sizes of a layer."""
        return SelectiveScan.from_gguf(metadata, self.name)

    def tensors(self, config: MambaConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            c.sizes.add_tensors(block, c.n_embd)
        return table

    def forward(self, g: Graph, config: MambaConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            x = x + c.sizes.layer(g, block, g.rms_norm(x, block.attn_norm, c.rms_eps), c.rms_eps)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)


class Mamba2(Mamba):
    """`general.architecture = mamba2`: Mamba-2 and Codestral Mamba."""

    name = "mamba2"

    def read_sizes(self, metadata: Metadata) -> Any:
        """Sizes of a layer."""
        return Duality.from_gguf(metadata, self.name)
