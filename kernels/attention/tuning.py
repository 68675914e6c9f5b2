"""Which tile, how many warps and how many pipeline stages each architecture takes: a table, read once at start.

Nothing is tuned at serving time: a search would hold up the first requests, and could choose another kernel on each
start. Knows no kernel; benchmarks/tune_kernels.py measures the rows.
"""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TUNED_TILES = Path(__file__).with_name("tuned_tiles.json")
DEFAULT_ARCH = "default"
INTERPRETER_ARCH = "interpreter"
KINDS = ("decode", "prefill", "invariant")
SAME_WIDTH = {"bfloat16": "float16"}  # dtypes for which one row is right: they differ in no cost


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One instance of the attention kernel."""

    query_rows: int  # tokens x heads of one group, a power of two
    keys: int  # a power of two
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TileRow:
    """What one configuration is for, and where it comes from."""

    arch: str  # "sm_80", "sm_90", "sm_100", "gfx942", "interpreter" or "default"
    head_dim: int  # for heads up to this size
    group_size: int | None  # query heads per KV head that it was measured with; None = any
    kind: str  # one of KINDS
    kv_dtype: str  # of the cache, by torch's name; "float16" stands for bfloat16 too
    config: TileConfig
    source: str  # "compiled" (spills nothing, not measured yet) or the run that measured it


class TileTable:
    """Rows, and the rule by which a layer that was not tuned finds the nearest one."""

    def __init__(self, rows: Iterable[TileRow]) -> None:
        """Later rows replace earlier ones of the same key."""
        self._rows = {_key(row): row for row in rows}

    @classmethod
    def load(cls, path: Path = TUNED_TILES) -> Self:
        """The table of a JSON file: a list of objects with the fields of `TileRow`, the configuration's beside them."""
        config_fields = [field.name for field in dataclasses.fields(TileConfig)]
        rows = []
        for entry in json.loads(path.read_text()):
            config = TileConfig(**{name: entry.pop(name) for name in config_fields})
            rows.append(TileRow(**entry, config=config))
        return cls(rows)

    def save(self, path: Path = TUNED_TILES) -> None:
        """Write the file that `load` reads, one row a line, sorted."""
        lines = []
        for row in self.rows:
            entry = dataclasses.asdict(row)
            config, source = entry.pop("config"), entry.pop("source")
            lines.append(json.dumps({**entry, **config, "source": source}))
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n")

    @property
    def rows(self) -> list[TileRow]:
        """All rows, sorted."""
        return sorted(self._rows.values(), key=lambda row: (*_key(row)[:4], row.group_size or 0))

    def with_row(self, row: TileRow) -> Self:
        """The same table with one row added or replaced."""
        return type(self)([*self._rows.values(), row])

    def lookup(self, arch: str, head_dim: int, group_size: int, kind: str, kv_dtype: str) -> TileConfig:
        """The configuration of a layer, with at least the query rows that one token's group needs.

        The nearest row: of the architecture (else of "default"), of the dtype (else of its width), of the smallest
        head size that is no smaller (else the largest), and of the nearest group size.

        Raises:
            LookupError: the table has no row of this kind and dtype, not even a default one.
        """
        config = self._nearest(arch, head_dim, group_size, kind, kv_dtype).config
        needed_rows = 1 << (group_size - 1).bit_length()
        return dataclasses.replace(config, query_rows=max(config.query_rows, needed_rows))

    def _nearest(self, arch: str, head_dim: int, group_size: int, kind: str, kv_dtype: str) -> TileRow:
        for row_arch in (arch, DEFAULT_ARCH):
            for row_dtype in (kv_dtype, SAME_WIDTH.get(kv_dtype)):
                wanted = (row_arch, kind, row_dtype)
                found = [row for row in self._rows.values() if (row.arch, row.kind, row.kv_dtype) == wanted]
                if found:
                    return min(found, key=lambda row: _distance(row, head_dim, group_size))
        raise LookupError(f"no {kind} tile for {kv_dtype} on {arch}, and no default one")


def _key(row: TileRow) -> tuple[str, str, str, int, int | None]:
    return row.arch, row.kind, row.kv_dtype, row.head_dim, row.group_size


def _distance(row: TileRow, head_dim: int, group_size: int) -> tuple[bool, int, int]:
    """Smaller is nearer: a row for smaller heads only when there is no other, then by head size, then by group."""
    group_distance = 1  # a row for any group, behind one of the very group and before one of another
    if row.group_size is not None:
        group_distance = 2 * abs(row.group_size - group_size)
    return row.head_dim < head_dim, abs(row.head_dim - head_dim), group_distance
