"""Conversion of GGUF files to other tensor types."""

from llamacli.conversion.convert import Plan, PlannedTensor, plan, write
from llamacli.conversion.mixtures import FILE_TYPES, FileType, file_type

__all__ = ["FILE_TYPES", "FileType", "Plan", "PlannedTensor", "file_type", "plan", "write"]
