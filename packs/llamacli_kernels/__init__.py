"""Kernel packs: files of object code, which `llamacli.kernels.packs` reads."""
