"""The table of tiles: which row a layer finds, and that the packaged file serves every architecture."""

from pathlib import Path

import pytest

from kernels.attention.tuning import KINDS, TUNED_TILES, TileConfig, TileRow, TileTable

CONFIG = TileConfig(16, 64, 4, 2)
DTYPES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn")


def row(
    keys: int,
    arch: str = "sm_90",
    head_dim: int = 128,
    group_size: int | None = None,
    kind: str = "decode",
    kv_dtype: str = "float16",
) -> TileRow:
    return TileRow(arch, head_dim, group_size, kind, kv_dtype, TileConfig(16, keys, 4, 2), "compiled")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(16), row(32, arch="default")], 16),
        ([row(16, arch="sm_80"), row(32, arch="default")], 32),
        ([row(16), row(32, kv_dtype="bfloat16")], 32),
        ([row(16, arch="default", kv_dtype="bfloat16"), row(32)], 32),  # the architecture before the dtype
        ([row(16, head_dim=64), row(32, head_dim=128), row(64, head_dim=256)], 32),
        ([row(16, head_dim=64), row(32, head_dim=256)], 32),  # no row for smaller heads where there is one for larger
        ([row(16, head_dim=16), row(32, head_dim=64)], 32),
        ([row(16, group_size=1), row(32), row(64, group_size=8)], 32),  # any group before another group
        ([row(16, group_size=4), row(32)], 16),
        ([row(16, group_size=1), row(32, group_size=5)], 32),
        ([row(16, kind="prefill"), row(32)], 32),
        ([row(16), row(32)], 32),  # the later of one key
    ],
)
def test_the_nearest_row(rows: list[TileRow], expected: int) -> None:
    """Of a layer with heads of 80 and groups of 4 on Hopper."""
    assert TileTable(rows).lookup("sm_90", 80, 4, "decode", "bfloat16").keys == expected


@pytest.mark.parametrize(("group_size", "query_rows"), [(1, 16), (9, 16), (16, 16), (17, 32), (64, 64)])
def test_a_tile_holds_at_least_one_token(group_size: int, query_rows: int) -> None:
    assert TileTable([row(64)]).lookup("sm_90", 128, group_size, "decode", "float16").query_rows == query_rows


def test_no_row_at_all() -> None:
    with pytest.raises(LookupError, match="no prefill tile for int8 on sm_90"):
        TileTable([row(64)]).lookup("sm_90", 128, 4, "prefill", "int8")


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    table = TileTable([row(16, group_size=4), row(32, arch="default")]).with_row(row(64))
    table.save(path)
    assert TileTable.load(path).rows == table.rows
    assert len(table.rows) == 3


def test_the_packaged_table_is_saved_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    TileTable.load().save(path)
    assert path.read_text() == TUNED_TILES.read_text()


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["default", "interpreter", "sm_75", "sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_layer_finds_a_tile(arch: str, kind: str, kv_dtype: str) -> None:
    for head_dim in (16, 64, 80, 96, 128, 256):
        for group_size in (1, 7, 9, 32):
            config = TileTable.load().lookup(arch, head_dim, group_size, kind, kv_dtype)
            assert group_size <= config.query_rows
            for side in (config.query_rows, config.keys):
                assert side >= 16
                assert side & (side - 1) == 0
