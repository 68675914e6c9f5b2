"""The steps run at start must be ones that the scheduler could have made."""

from pathlib import Path

import pytest

from models.row_table import RowTable
from server.config import load_settings
from server.startup_steps import largest_step, warm_up


class BlockCheckingRunner:
    """Executes nothing: keeps the rows as the model runner does, and checks that their tokens have blocks."""

    def __init__(self, config, max_model_len):
        self.table = RowTable(config.max_num_seqs, max_model_len, config.block_size)
        self.num_tokens = []

    def execute(self, output):
        self.table.forget(output.finished_seq_ids)
        held = set()
        for row in output.rows:
            place = self.table.take(row)
            num_blocks = -(-row.end // self.table.block_size)
            blocks = self.table.block_tables[place, :num_blocks].tolist()
            assert len(set(blocks)) == num_blocks and not held & set(blocks)
            held |= set(blocks)
        self.num_tokens.append(output.num_tokens)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"),
    [(256, 8192, 4096, 16), (64, 512, 40, 16), (65, 64, 2048, 16), (1, 17, 16, 1), (4, 1, 8, 4), (3, 100, 1, 2)],
)
def test_steps_run_at_start_fit_the_runner(max_num_seqs, max_num_batched_tokens, max_model_len, block_size):
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "block_size": block_size}
    config = load_settings({name: str(size) for name, size in sizes.items()}).engine_config(Path("/nonexistent"))
    runner = BlockCheckingRunner(config, max_model_len)
    warm_up(runner, config, max_model_len)
    runner = BlockCheckingRunner(config, max_model_len)
    runner.execute(largest_step(config, max_model_len))
    assert 0 < runner.num_tokens[0] <= max_num_batched_tokens
