"""Record llama.cpp's embeddings of a few tokens: `python -m oracle.embeddings`.

With `--encoders`, those of models without logits instead, with `--classifiers` the scores of rerankers; `--only`
records some of them, and keeps the others.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

import tiny_variants
from oracle.goldens import DIRECTORY, TOKENS

GOLDEN, ENCODERS_GOLDEN = DIRECTORY / "embeddings.npz", DIRECTORY / "encoders.npz"
CLASSIFIERS_GOLDEN = DIRECTORY / "classifiers.npz"
VARIANTS = (
    "gqa",
    "tied",
    "moe_4_1",
    "gemma2",
    "gemma4",
    "gptoss_gqa",
    "lfm2_dense",
    "phi3_gqa",
    "qwen2_output_bias",
    "qwen3_gqa",
)
POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3}
"""Numbers that llama.cpp and files have for them, by name."""
RANK = {"rank": 4}


def _embed(path: Path, pooling: int) -> npt.NDArray[np.float32]:
    """Run llama.cpp on TOKENS; one vector, or one a token without pooling."""
    import llama_cpp

    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False  # repacking for AMX ends in SIGILL where a hypervisor forbids AMX
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.embeddings, params.pooling_type = True, pooling
    params.type_k = params.type_v = 0  # float32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(TOKENS), 0, 1)
    batch.n_tokens = len(TOKENS)
    for i, token in enumerate(TOKENS):
        batch.token[i], batch.pos[i], batch.logits[i] = int(token), i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    encodes = llama_cpp.llama_model_has_encoder(model)  # decoding would attend to earlier tokens only
    if (llama_cpp.llama_encode if encodes else llama_cpp.llama_decode)(context, batch):
        raise SystemExit(f"the peer does not embed with {path}")
    is_rank = pooling == RANK["rank"]
    n_embd = (llama_cpp.llama_model_n_cls_out if is_rank else llama_cpp.llama_model_n_embd_out)(model)
    if pooling:
        vectors = np.array(llama_cpp.llama_get_embeddings_seq(context, 0)[:n_embd], np.float32)
    else:
        rows = [llama_cpp.llama_get_embeddings_ith(context, i)[:n_embd] for i in range(len(TOKENS))]
        vectors = np.array(rows, np.float32)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return vectors


def _record(golden: Path, variants: Iterable[str], only: Iterable[str], poolings: Mapping[str, int] = POOLINGS) -> None:
    import llama_cpp

    llama_cpp.llama_backend_init()
    vectors = {}
    if only:
        with np.load(golden) as recorded:
            names = [f"{variant}-{name}" for variant in variants for name in poolings]
            vectors = {name: recorded[name] for name in names if name in recorded}
    with tempfile.TemporaryDirectory() as folder:
        for variant in only or variants:
            path = tiny_variants.write(Path(folder) / f"{variant}.gguf", variant)
            for name, number in poolings.items():
                vectors[f"{variant}-{name}"] = _embed(path, number)
    np.savez_compressed(golden, **vectors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoders", action="store_true")
    parser.add_argument("--classifiers", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], metavar="VARIANT")
    options = parser.parse_args()
    if options.encoders:
        _record(ENCODERS_GOLDEN, tiny_variants.ENCODERS, options.only)
    elif options.classifiers:
        _record(CLASSIFIERS_GOLDEN, tiny_variants.CLASSIFIERS, options.only, RANK)
    else:
        _record(GOLDEN, VARIANTS, options.only)
