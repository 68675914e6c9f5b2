"""The paged KV cache: host bookkeeping of fixed-size blocks, and the device tensors they name."""
