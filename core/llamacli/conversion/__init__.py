"""Conversion of model files to other tensor types."""

from llamacli.conversion.convert import Plan, PlannedTensor, SourceFile, plan, unchanged, write
from llamacli.conversion.imatrix import Importance, ImportanceMatrix, read_imatrix, write_imatrix
from llamacli.conversion.mixtures import FILE_TYPE_NAMES, FILE_TYPES, FileType, file_type

__all__ = [
    "FILE_TYPES", "FILE_TYPE_NAMES", "FileType", "Importance", "ImportanceMatrix", "Plan", "PlannedTensor",
    "SourceFile", "file_type", "plan", "read_imatrix", "unchanged", "write", "write_imatrix",
]  # fmt: skip
