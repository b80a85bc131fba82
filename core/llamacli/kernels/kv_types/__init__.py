"""Storage types of cached keys and values: layout, rounding, and kernels that read and write cells."""
