"""The continuous-batching scheduler. Pure Python: decides which tokens run in the next step, never how."""
