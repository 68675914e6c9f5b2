"""The board that is checked in: made by its script, drawn without overlap, asking only for what the server exports."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from deploy.grafana.board_queries import UnknownVariable, filled, panels_of, queries_of
from deploy.grafana.make_board import BOARD, board_json
from deploy.grafana.vllm_boards import VLLM_BOARDS
from tests.deploy.grafana.exported_series import TARGET_LABELS, ExportedSeries
from tests.server.doubles import FakeEngine, client_of, make_app

ROOT = Path(__file__).parent.parent.parent.parent
BOARD_JSON = json.loads(BOARD.read_text())
PANELS = list(panels_of(BOARD_JSON))
QUERIES = queries_of(BOARD_JSON)
MODEL = "some/model"
VALUES = {
    "__rate_interval": "20s",
    "model_name": MODEL,
    "first_token_seconds": "1.0",
    "next_token_seconds": "0.2",
    "instance": TARGET_LABELS["instance"],
    "job": TARGET_LABELS["job"],
    "engine": "0",
    "ttft_slo": "2.5",
    "tpot_slo": "0.2",
    "Deployment_id": ".+",
    "__range": "1m",
}


@pytest.fixture
async def exported():
    app = make_app(FakeEngine(), model=MODEL, served_model_name=MODEL)
    async with client_of(app) as client:
        # So that the series are there that only a request's key makes.
        await client.post("/v1/completions", json={"model": MODEL, "prompt": "abc", "max_tokens": 2})
        recorded = re.findall(r"- record: (\S+)", (ROOT / "deploy/prometheus/rules.yml").read_text())
        return ExportedSeries((await client.get("/metrics")).text, recorded)


def test_the_script_makes_the_file():
    assert BOARD.read_text() == board_json(), "run deploy/grafana/make_board.py"


def test_panels_have_numbers_of_their_own():
    numbers = [panel["id"] for panel in [*PANELS, *(p for p in BOARD_JSON["panels"] if p["type"] == "row")]]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) > 0


def cells(panel: dict) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    return {
        (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    }


def test_panels_lie_beside_each_other_within_the_grid():
    assert all(0 <= x < 24 for panel in BOARD_JSON["panels"] for x, _ in cells(panel))
    for one, other in combinations(BOARD_JSON["panels"], 2):
        assert not cells(one) & cells(other), f"{one['title']} lies on {other['title']}"


def test_every_panel_says_what_it_shows_and_asks_the_chosen_data_source():
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert len(set(letters)) == len(letters)
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)


async def test_the_server_exports_all_that_the_board_asks_for(exported):
    for query in QUERIES:
        assert exported.missing(filled(query.query, VALUES)) == [], query.panel


async def test_the_server_exports_all_that_boards_for_vllm_ask_for(exported):
    for board, panels in VLLM_BOARDS.items():
        for panel, queries in panels.items():
            for query in queries:
                assert exported.missing(filled(query, VALUES)) == [], f"{board}: {panel}"


async def test_what_is_not_exported_is_found(exported):
    assert exported.missing('rate(vllm:no_such_total{model_name=~".+"}[1m])')
    assert exported.missing('sum by (le) (vllm:num_requests_running{engine="0"})') == ["le"]
    assert exported.missing('vllm:request_success_total{finished_reason="luck"}')
    assert exported.missing('vllm:time_to_first_token_seconds_bucket{le="0.3"} / vector(1)')
    assert exported.missing('vllm:time_to_first_token_seconds_bucket{le="1.0"} / vector(1)') == []


async def test_every_choice_of_a_promise_is_an_edge_of_the_buckets(exported):
    variables = {variable["name"]: variable for variable in BOARD_JSON["templating"]["list"]}
    for name, series in (("first_token", "time_to_first_token"), ("next_token", "inter_token_latency")):
        choices = variables[f"{name}_seconds"]["query"].split(",")
        assert [option["value"] for option in variables[f"{name}_seconds"]["options"]] == choices
        assert variables[f"{name}_seconds"]["current"]["value"] in choices
        for choice in choices:
            assert exported.missing(f'vllm:{series}_seconds_bucket{{le="{choice}"}}') == []


# Not on the board: what says the same as another series there, or is always 0 or 1 here.
LEFT_OUT = {
    *("vllm:cache_config_info", "vllm:lora_requests_info", "vllm:engine_sleep_state", "vllm:num_requests_waiting"),
    *("vllm:gpu_cache_usage_perc", "vllm:cpu_cache_usage_perc", "vllm:time_per_output_token_seconds"),
    *("vllm:request_time_per_output_token_seconds", "vllm:request_inference_time_seconds"),
    *("vllm:request_prefill_kv_computed_tokens", "vllm:request_max_num_generation_tokens"),
    *("vllm:prompt_tokens_cached", "vllm:admission_rejections", "vllm:corrupted_requests"),
    *("vllm:external_prefix_cache", "vllm:mm_cache", "vllm:gpu_prefix_cache", "vllm:spec_decode"),
    *("octavo_engine_prompt_tokens", "octavo_engine_generation_tokens"),
}


async def test_a_new_series_comes_onto_the_board_or_is_left_out_knowingly(exported):
    asked = set(re.findall(r"\b(?:vllm:|octavo_)\w+", " ".join(query.query for query in QUERIES)))
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exported.names}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    ours = {name for name in families if name.startswith(("vllm:", "octavo_"))}
    unseen = {name for name in ours - shown if not name.startswith(tuple(LEFT_OUT))}
    assert {re.sub(r"_total$", "", name) for name in unseen} <= {re.sub(r"_total$", "", name) for name in shown}


def test_the_data_source_that_is_provided_has_the_interval_of_the_scrapes():
    provided = (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text()
    scraped = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    (interval,) = re.findall(r"timeInterval: (\w+)", provided)
    job = scraped.partition("job_name: octavo\n")[2].partition("job_name:")[0]
    assert re.findall(r"scrape_interval: (\w+)", job) == [interval]


def test_a_variable_without_a_value_is_named():
    values = {"a": "1", "__rate_interval": "5s", "b": "2", "c": "3"}
    assert filled('x{a="$a"}[$__rate_interval] ${b} ${c:regex}', values) == 'x{a="1"}[5s] 2 3'
    with pytest.raises(UnknownVariable, match=r"\$b has no value"):
        filled("$a + $b", {"a": "1"})
