"""Makes deploy/grafana/dashboards/octavo.json, the board that Grafana shows for Octavo: `make_board.py`.

With --check it writes nothing and fails where the file is not what it would write. Needs `pip install .[deploy]`.
"""

import argparse
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

if not __package__:  # run as a script: Python has put this folder on the path, not the repository's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from deploy.grafana.engine_rows import info_row, kv_cache_row, process_row, scheduler_row
from deploy.grafana.panels import DATA_SOURCE, placed
from deploy.grafana.service_rows import fairness_row, http_row, objective_row, service_row, token_row

BOARD = Path(__file__).resolve().parent / "dashboards" / "octavo.json"
_KNOWN_BY = "vllm:num_requests_running"  # that every server has from its start, with all labels
# Edges of the histograms' buckets, as Prometheus writes them.
_FIRST_TOKEN_SECONDS = ("0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "20.0")
_NEXT_TOKEN_SECONDS = ("0.01", "0.025", "0.05", "0.1", "0.2", "0.5", "1.0")


def board_json() -> str:
    """The board, as its file holds it."""
    board = (
        dashboard.Dashboard("Octavo")
        .uid("octavo")
        .description("Requests, scheduler and KV cache of Octavo servers.")
        .tags(["octavo", "llm"])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .variables(_variables())
        .annotation(_restarts())
        .build()
    )
    rows = [service_row(), objective_row(), scheduler_row(), kv_cache_row(), token_row(), fairness_row(), http_row()]
    board.panels = placed([*rows, process_row(), info_row()])
    return json.dumps(board, cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _variables() -> list[Builder[models.VariableModel]]:
    data_source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return [
        data_source,
        _labels_variable("model_name", "Model", f"label_values({_KNOWN_BY}, model_name)"),
        _labels_variable("instance", "Server", f'label_values({_KNOWN_BY}{{model_name=~"$model_name"}}, instance)'),
        _labels_variable(
            "engine",
            "Engine",
            f'label_values({_KNOWN_BY}{{model_name=~"$model_name", instance=~"$instance"}}, engine)',
        ),
        _bound_variable("first_token_seconds", "First token within (s)", _FIRST_TOKEN_SECONDS, "2.5"),
        _bound_variable("next_token_seconds", "Next token within (s)", _NEXT_TOKEN_SECONDS, "0.2"),
    ]


def _labels_variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Any number of a label's values, all to begin with."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATA_SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _bound_variable(name: str, label: str, bounds: tuple[str, ...], chosen: str) -> dashboard.CustomVariable:
    """One of a histogram's edges; another value would match no bucket."""
    options = [models.VariableOption(selected=bound == chosen, text=bound, value=bound) for bound in bounds]
    return (
        dashboard.CustomVariable(name)
        .label(label)
        .values(",".join(bounds))
        .options(options)
        .current(models.VariableOption(selected=True, text=chosen, value=chosen))
        .allow_custom_value(False)
    )


def _restarts() -> dashboard.AnnotationQuery:
    """A mark across all panels wherever an engine was lost."""
    return (
        dashboard.AnnotationQuery()
        .name("Lost engine")
        .datasource(DATA_SOURCE)
        .enable(True)
        .icon_color("red")
        .expr('changes(octavo_engine_restarts_total{instance=~"$instance"}[1m]) > 0')
    )


def main() -> int:
    """Write the board, or compare it; 1 where it differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is not up to date")
    arguments = parser.parse_args()
    text = board_json()
    if not arguments.check:
        BOARD.write_text(text)
        return 0
    if BOARD.is_file() and BOARD.read_text() == text:
        return 0
    print(f"{BOARD} is not what this script makes of it; run it without --check.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
