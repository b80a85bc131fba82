"""Stand-ins for models that pages of the documentation download or train.

`aliases.toml` gives them the names of the real ones.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tiny_bert
import tiny_llama
from checkpoint_cases import write_adapter, write_checkpoint
from llamacli.hub.demo import demo_path
from llamacli.testing.vocabularies import BERT_HEAD, word_piece

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
COMMON_WORDS = re.compile("an?|and|at|for|in|its?|is|of|on|the|where|which|how|many|must")


def write_pages_folder(folder: Path) -> Path:
    """Write the files that pages name; return the folder for XDG_CONFIG_HOME."""
    shutil.copytree(TUTORIALS / "shapes", folder / "shapes")
    write_checkpoint(folder, "llama").rename(folder / "my-model")
    write_adapter(folder, "llama").rename(folder / "my-adapter")
    names = {
        "qwen3:0.6b": demo_path(),
        "embeddinggemma:300m": write_bag_of_words(folder / "words.gguf", [(TUTORIALS / "11-search.md").read_text()]),
        "qwen2.5-coder:1.5b": write_coder(folder / "coder.gguf"),
    }
    config = folder / "config" / "llamacli"
    config.mkdir(parents=True)
    (folder / "notes.txt").write_text("The fox went to the mill. It met an owl.\n")
    (config / "aliases.toml").write_text(
        "".join(f'"{name}" = {json.dumps(str(path))}\n' for name, path in names.items())
    )
    return config.parent


def write_bag_of_words(path: Path, texts: Sequence[str], n_embd: int = 64) -> Path:
    """Write an embedding model of bags of words, without common ones."""
    words = sorted({word for text in texts for word in re.findall(r"[a-z0-9]+|[^\w\s]", text.lower())})
    table = np.random.default_rng(1).standard_normal((len(BERT_HEAD) + len(words), n_embd)).astype(np.float32)
    table[: len(BERT_HEAD)] = 0
    table[[i for i, word in enumerate(words, len(BERT_HEAD)) if not word.isalnum() or COMMON_WORDS.fullmatch(word)]] = 0
    zeros = {"token_types.weight": (2, n_embd), "position_embd.weight": (64, n_embd), "token_embd_norm.bias": (n_embd,),
             "blk.0.attn_output.weight": (n_embd, n_embd), "blk.0.ffn_down.weight": (n_embd, 96)}  # fmt: skip
    biases = ("attn_output", "ffn_down", "attn_output_norm", "layer_output_norm")
    zeros |= {f"blk.0.{name}.bias": (n_embd,) for name in biases}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in zeros.items()}
    vocabulary = word_piece([f"\u2581{word}" for word in words])
    vocabulary = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in vocabulary.items()}
    return tiny_bert.write_bert(
        path, n_layer=1, n_embd=n_embd, pooling=1, metadata=vocabulary, tensors=tensors | {"token_embd.weight": table}
    )


def write_coder(path: Path) -> Path:
    """Write a model of random weights with fill-in-the-middle tokens."""
    tokens = {f"tokenizer.ggml.fim_{kind}_token_id": 4 + i for i, kind in enumerate(("pre", "suf", "mid"))}
    return tiny_llama.write_llama(path, tokenizer="spm", context_length=4096, metadata=tokens)
