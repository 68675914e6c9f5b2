"""Attention over a paged KV cache behind one protocol; `select_backend` picks the implementation once at start."""
