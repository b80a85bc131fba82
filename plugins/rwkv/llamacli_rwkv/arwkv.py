"""ARWKV-7 (Yueyu et al. 2025, arXiv:2501.15570).

Qwen 2.5 with the time mix of RWKV-7 in place of attention.
"""

from llamacli.plugin import Graph, Metadata, TensorTable, Value, Weights, add_network, hookimpl, network
from llamacli_rwkv import Rwkv7, RwkvConfig

LLAMACLI_API = 1


class Arwkv7(Rwkv7):
    """`general.architecture = arwkv7`; files may lack gates and the norm of heads."""

    name = "arwkv7"
    n_shift = 1

    def gate_rank(self, metadata: Metadata) -> int:
        """Width of the low-rank projection of gates, 0 without gates."""
        return metadata.get_int(f"{self.name}.attention.gate_lora_rank", default=0, minimum=0, maximum=1 << 20)

    def epsilon(self, metadata: Metadata) -> dict[str, float]:
        """Field of the epsilon of the norms."""
        key = f"{self.name}.attention.layer_norm_rms_epsilon"
        return {"rms_eps": metadata.get_float(key, minimum=0.0, maximum=1.0)}

    def tensors(self, config: RwkvConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        for i in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            self.add_mix(block, c, i)
            block.add("time_mix_ln", c.n_embd, optional=True)
            block.add_tensor("time_mix_ln.bias", c.n_embd, optional=True)
            block.add("ffn_norm", c.n_embd)
            add_network(block, c, c.n_ff)
        return table

    def forward(self, g: Graph, config: RwkvConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w, first = config, weights, None
        x = g.embed(w.token_embd)
        for block in w.blk:
            mixed, first = self.time_mix(g, c, block, g.rms_norm(x, block.attn_norm, c.rms_eps), first)
            x = x + mixed
            x = x + network(g, block, g.rms_norm(x, block.ffn_norm, c.rms_eps))
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Arwkv7())
