"""Storage types of cached keys and values.

- `types`: names, memory layout, and the NumPy reference that writes and reads cells.
- `rounding`: quantization of a block to integer codes, in NumPy.
- `cells`: the same as Numba kernels and LLVM IR, bit for bit.

These modules know addresses and arrays only. Pages, sequences and page tables are in `llamacli.kv`, which imports them.
"""
