"""Helpers that know nothing of models: numbers, files, folders, memory, the machine."""
