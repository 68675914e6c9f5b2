"""The device kernels: attention over a paged KV cache, and what runs around it.

Knows tensors only; imports nothing of the other packages. `__version__` is read by transformers, which
looks for a distribution called `kernels` and finds this package instead when both are on the path.
"""

__version__ = "0.1.0"
