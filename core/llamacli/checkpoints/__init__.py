"""Hugging Face folders as model files: config.json, safetensors, tokenizer."""

from llamacli.checkpoints.file import FILE_TYPES, CheckpointFile
from llamacli.checkpoints.folder import Folder
from llamacli.checkpoints.layout import Checkpoint, Conversion
from llamacli.checkpoints.peft import PeftAdapter

__all__ = ["FILE_TYPES", "Checkpoint", "CheckpointFile", "Conversion", "Folder", "PeftAdapter"]
