"""The block table of one sequence: which physical block holds each run of its tokens. Changed by the manager alone."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """Token t of the sequence lives in block `block_ids[t // block_size]`, slot `t % block_size`."""

    block_ids: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        """Blocks held."""
        return len(self.block_ids)
