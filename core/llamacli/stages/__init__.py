"""Pipeline parallelism over TCP: a model's layers on several machines."""
