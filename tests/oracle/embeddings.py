"""Record llama.cpp's embeddings of a few tokens: `python -m oracle.embeddings`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import tiny_variants
from oracle.goldens import DIRECTORY, TOKENS

GOLDEN = DIRECTORY / "embeddings.npz"
VARIANTS = ("gqa", "tied", "moe_4_1", "gemma2", "gemma4", "gptoss_gqa", "phi3_gqa", "qwen2_output_bias", "qwen3_gqa")
POOLINGS = {"mean": 1, "cls": 2, "last": 3}
"""By name, and the numbers that llama.cpp and files have for them."""


def _record() -> None:
    import llama_cpp

    llama_cpp.llama_backend_init()
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            path = tiny_variants.write(Path(folder) / f"{variant}.gguf", variant)
            model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
            for name, number in POOLINGS.items():
                params = llama_cpp.llama_context_default_params()
                params.n_ctx = params.n_batch = params.n_ubatch = 256
                params.embeddings, params.pooling_type = True, number
                params.type_k = params.type_v = 0  # float32
                params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
                context = llama_cpp.llama_init_from_model(model, params)
                batch = llama_cpp.llama_batch_init(len(TOKENS), 0, 1)
                batch.n_tokens = len(TOKENS)
                for i, token in enumerate(TOKENS):
                    batch.token[i], batch.pos[i], batch.logits[i] = int(token), i, 1
                    batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                if llama_cpp.llama_decode(context, batch):
                    raise SystemExit(f"the peer does not embed with {variant}")
                vector = llama_cpp.llama_get_embeddings_seq(context, 0)
                golden[f"{variant}-{name}"] = np.array(vector[: llama_cpp.llama_model_n_embd(model)], np.float32)
                llama_cpp.llama_batch_free(batch)
                llama_cpp.llama_free(context)
            llama_cpp.llama_model_free(model)
    np.savez(GOLDEN, **golden)


if __name__ == "__main__":
    _record()
