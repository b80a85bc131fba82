#!/usr/bin/env python3
"""Embed texts with ONNX Runtime; print the seconds.

    python benchmarks/onnx_bench.py FOLDER --make     # write a model of bge-small's shape, and FOLDER/int8.onnx
    python benchmarks/onnx_bench.py FOLDER/int8.onnx < texts.json

See `embedding.py`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np


def make(folder: Path) -> None:
    """Write a model of random weights, and its graph of 8 bits."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel

    class States(torch.nn.Module):
        """Hidden states of the last layer."""

        def __init__(self, model: BertModel):
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    config = BertConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1536)
    model = BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    words = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"w{i}" for i in range(config.vocab_size - len(words))]
    BertWordPieceTokenizer({word: i for i, word in enumerate(words)}).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    ids = torch.ones((2, 8), dtype=torch.int64)
    axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask", "last_hidden_state")}
    torch.onnx.export(
        States(model), (ids, ids), str(folder / "float.onnx"), input_names=["input_ids", "attention_mask"],
        output_names=["last_hidden_state"], dynamic_axes=axes, dynamo=False,
    )  # fmt: skip
    quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", weight_type=QuantType.QInt8)


def seconds(file: Path, texts: list[list[int]], batch: int, threads: int) -> float:
    """Seconds of all texts, the faster of two runs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    ordered = sorted(texts, key=len)

    def run() -> float:
        started = time.perf_counter()
        for first in range(0, len(ordered), batch):
            some = ordered[first : first + batch]
            ids = np.zeros((len(some), len(some[-1])), np.int64)
            mask = np.zeros_like(ids)
            for row, text in enumerate(some):
                ids[row, : len(text)], mask[row, : len(text)] = text, 1
            (states,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
            vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return time.perf_counter() - started

    run()
    return min(run(), run())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--make", action="store_true", help="write the model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("-t", "--threads", type=int, default=2)
    options = parser.parse_args()
    if options.make:
        make(options.path)
    else:
        print(seconds(options.path, json.load(sys.stdin), options.batch, options.threads))


if __name__ == "__main__":
    main()
