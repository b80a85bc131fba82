"""Helpers independent of models: numbers, files, directories, memory, locks, the system."""
