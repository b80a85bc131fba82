"""GGUF files: a strict reader with mapped tensor data, and a writer."""

from llamacli.gguf.file import GGUFFile, is_gguf, open_gguf
from llamacli.gguf.header import TensorInfo, parse_header
from llamacli.gguf.metadata import Metadata, StringArray
from llamacli.gguf.writer import Scalar, metadata_pair, packed_header, write_gguf

__all__ = [
    "GGUFFile", "Metadata", "Scalar", "StringArray", "TensorInfo", "is_gguf", "metadata_pair", "open_gguf",
    "packed_header", "parse_header", "write_gguf",
]  # fmt: skip
