"""The check of the board: what it takes for an answer and what not, and a real Prometheus where there is one."""

import math
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deploy.grafana.board_queries import PanelQuery
from deploy.grafana.check_board import VALUES, Answer, all_queries, ask, panels_table
from deploy.grafana.vllm_boards import VLLM_BOARDS
from deploy.local_prometheus import QueryRefused, Sample, local_prometheus

COUNTER = 'rate(vllm:generation_tokens_total{engine=~"$engine"}[$__rate_interval])'


class Scripted:
    """A Prometheus that gives the same series to whatever it is asked."""

    def __init__(self, *values: float, refuses: str | None = None) -> None:
        self.values = values
        self.refuses = refuses
        self.asked: list[str] = []

    def query(self, expression: str) -> list[Sample]:
        self.asked.append(expression)
        if self.refuses is not None:
            raise QueryRefused(self.refuses)
        return [Sample({"n": str(number)}, value) for number, value in enumerate(self.values)]


def asked(prometheus: Scripted, query: str = COUNTER) -> Answer:
    return ask(prometheus, PanelQuery("board", "panel", query))


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ((3.0,), "answered"),
        ((math.nan, 0.0, 2.0), "answered"),
        ((), "no series"),
        ((math.nan,), "no number"),
        ((math.inf, math.nan), "no number"),
        ((0.0, 0.0), "only zeros"),
        ((0.0, math.nan), "only zeros"),
    ],
)
def test_an_answer_is_a_number_other_than_zero(values, state):
    answer = asked(Scripted(*values))
    assert (answer.state, answer.num_series) == (state, len(values))


@pytest.mark.parametrize(
    "query", ["sum(octavo_engine_restarts_total)", 'sum(rate(http_requests_total{status="5xx"}[1m]))']
)
def test_what_counts_trouble_may_be_zero_but_not_missing(query):
    assert asked(Scripted(0.0), query).state == "answered"
    assert asked(Scripted(), query).state == "no series"


def test_what_no_server_of_ours_does_may_be_left_out_but_not_missing():
    drafts = "sum(rate(vllm:spec_decode_num_drafts_total[1m]))"
    assert asked(Scripted(), f"{drafts} / ({drafts} > 0)").state == "answered"
    assert asked(Scripted(0.0), drafts).state == "answered"
    assert asked(Scripted(), drafts).state == "no series"
    for never_left_out in (COUNTER, drafts):
        assert asked(Scripted(), f"{never_left_out} / ({COUNTER} > 0)").state == "no series"


def test_a_refused_query_keeps_the_reason():
    answer = asked(Scripted(refuses="bad_data: no"))
    assert (answer.state, answer.message) == ("refused", "bad_data: no")


def test_grafanas_variables_are_filled_in():
    prometheus = Scripted(1.0)
    asked(prometheus)
    assert prometheus.asked == ['rate(vllm:generation_tokens_total{engine=~".+"}[20s])']
    assert VALUES["__rate_interval"] == "20s"


def test_a_panel_is_wrong_if_one_of_its_queries_is():
    good, bad = PanelQuery("b", "p", "one"), PanelQuery("b", "p", "two")
    table = panels_table([Answer(good, "answered", 2), Answer(bad, "no series"), Answer(good, "answered", 1)])
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["b"], ["p"], ["3"], ["3"], ["no series: two"]]


def test_our_board_and_vllms_are_asked():
    boards = {query.board for query in all_queries()}
    assert boards == {"Octavo", *VLLM_BOARDS}
    assert len(VLLM_BOARDS) == 8


class Exporter(BaseHTTPRequestHandler):
    """One counter that grows with each scrape, for whoever brings the key."""

    num_scrapes = 0

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer secret":
            self.send_error(401)
            return
        type(self).num_scrapes += 1
        body = f'octavo_engine_steps_total{{engine="0"}} {self.num_scrapes}\n'.encode()
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)")
def test_a_real_prometheus_scrapes_and_answers(tmp_path):
    rules = tmp_path / "rules.yml"
    rules.write_text(
        "groups: [{name: g, interval: 100ms, rules: [{alert: Moves, expr: octavo_engine_steps_total > 0}]}]\n"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Exporter) as exporter:
        threading.Thread(target=exporter.serve_forever, daemon=True).start()
        target = f"127.0.0.1:{exporter.server_port}"
        with local_prometheus(target, key="secret", scrape_seconds=0.2, rules=[rules]) as prometheus:
            end = time.monotonic() + 30
            while not prometheus.alerts() and time.monotonic() < end:
                time.sleep(0.1)
            (alert,) = prometheus.alerts()
            assert alert["labels"]["alertname"] == "Moves"
            (sample,) = prometheus.query("octavo_engine_steps_total")
            assert sample.labels["instance"] == target
            assert sample.labels["job"] == "octavo"
            assert sample.value >= 1
            assert prometheus.query("1 + 1") == [Sample({}, 2.0)]
            with pytest.raises(QueryRefused, match="parse error"):
                prometheus.query("sum(")
        exporter.shutdown()
