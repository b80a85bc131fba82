"""GGUF files: a strict reader with mapped tensor data, and a writer."""

from llamacli.gguf.file import GGUFFile, is_gguf, open_gguf
from llamacli.gguf.header import TensorInfo
from llamacli.gguf.metadata import Metadata, StringArray
from llamacli.gguf.writer import metadata_pair, write_gguf

__all__ = ["GGUFFile", "Metadata", "StringArray", "TensorInfo", "is_gguf", "metadata_pair", "open_gguf", "write_gguf"]
