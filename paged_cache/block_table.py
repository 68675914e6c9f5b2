"""The block table of one sequence: which physical block holds each run of its tokens. Changed by the manager alone."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """Token t of the sequence lives in block `block_ids[t // block_size]`, slot `t % block_size`."""

    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)  # in the same way, of a sequence that is swapped out
    num_registered: int = 0  # leading blocks that the prefix cache was told of

    def __len__(self) -> int:
        """Blocks held on the device."""
        return len(self.block_ids)
