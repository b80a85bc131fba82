"""A strict, bounded reader of GGUF files: metadata at once, tensor data mapped and read only when asked for."""

from llamacli.gguf.file import GGUFFile, is_gguf, open_gguf
from llamacli.gguf.header import TensorInfo
from llamacli.gguf.metadata import Metadata, StringArray

__all__ = ["GGUFFile", "Metadata", "StringArray", "TensorInfo", "is_gguf", "open_gguf"]
