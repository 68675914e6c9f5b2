"""The rules of Prometheus: promtool's own tests of them, and that they ask for what the server exports."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.doubles import FakeEngine, client_of, make_app

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
EXPRESSIONS = [rule["expr"] for rule in RULES]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
# Of Prometheus itself, not of what it scrapes.
BUILT_IN = {"up"}
# A name before its labels or range, or alone: neither a function nor the label of a matcher or a grouping.
SELECTOR = re.compile(r"(?<![\w:.])([a-z]\w*:[\w:]+|(?:http|octavo|process|vllm)_\w+|up)(\{[^}]*\})?")
MATCHER = re.compile(r'(\w+)="([^"]*)"')


def selectors():
    """Name and `label="value"` pairs of all that the rules ask for."""
    for expression in EXPRESSIONS:
        for name, labels in SELECTOR.findall(expression):
            yield name, MATCHER.findall(labels)


async def exported():
    """Every sample that the server shows before its first request."""
    async with client_of(make_app(FakeEngine())) as client:
        text = (await client.get("/metrics")).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def test_every_series_that_is_asked_for_is_recorded_or_exported():
    names = {sample.name for sample in await exported()}
    asked = {name for name, _ in selectors()}
    assert len(asked) > 20, "the pattern has lost its selectors"
    assert asked - RECORDED - BUILT_IN <= names
    assert {rule["record"] for rule in RULES if "record" in rule} == RECORDED


async def test_every_value_of_a_label_that_is_asked_for_is_exported():
    samples = await exported()
    num_checked = 0
    for name, matchers in selectors():
        for label, value in matchers:
            if label == "job" or name in RECORDED:
                continue
            values = {sample.labels.get(label) for sample in samples if sample.name == name}
            assert value in values, f"{name} has no {label}={value}"
            num_checked += 1
    assert num_checked >= 6


def test_what_is_recorded_is_named_once_for_each_set_of_labels():
    records = [(rule["record"], *sorted(rule.get("labels", {}).items())) for rule in RULES if "record" in rule]
    assert len(records) == len(set(records))
    slos = {name: {dict(rest)["slo"] for each, *rest in records if each == name and rest} for name, *_ in records}
    assert slos["octavo:slo_budget"] == slos["octavo:slo_all:rate5m"] == slos["octavo:slo_bad:rate5m"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_says_what_is_wrong_and_what_to_do(alert):
    assert alert["alert"].startswith("Octavo")
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(alert["annotations"]) == {"summary", "description", "action"}
    for text in alert["annotations"].values():
        assert text.endswith((".", "}}")), text
    assert len(alert["annotations"]["summary"]) < 100


def test_every_alert_is_tested_firing():
    cases = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    firing = [
        sample["labels"]
        for case in cases
        for query in case.get("promql_expr_test", ())
        for sample in query.get("exp_samples", ())
    ]
    firing += [
        f'"{each["alertname"]}"' for case in cases for each in case.get("alert_rule_test", ()) if "exp_alerts" in each
    ]
    for alert in ALERTS:
        window = alert["labels"].get("long_window")
        assert any(f'"{alert["alert"]}"' in labels and (not window or f'"{window}"' in labels) for labels in firing), (
            f"{alert['alert']} {window or ''} is never seen to fire"
        )


def test_the_burn_rates_sum_events_at_the_interval_of_their_rules():
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    assert {group["interval"] for group in groups if "slo" in group["name"]} == {"15s"}
    assert all("15 * sum_over_time(" in alert["expr"] for alert in ALERTS if "long_window" in alert["labels"])


def test_the_configuration_names_the_rules_and_the_job_that_they_ask_for():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert config["rule_files"] == ["rules.yml"]
    assert "octavo" in {job["job_name"] for job in config["scrape_configs"]}
    jobs = set(re.findall(r'job="(\w+)"', " ".join(EXPRESSIONS)))
    assert jobs == {"octavo"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_no_fault(tmp_path):
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    # The one file that only a container has: the check reads it.
    key = tmp_path / "octavo_admin_key"
    key.touch()
    config = (FOLDER / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(config.replace("/etc/prometheus/octavo_admin_key", str(key)))
    shutil.copy(FOLDER / "rules.yml", tmp_path)
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documentation_lists_every_alert_with_its_severity():
    text = (FOLDER.parents[1] / "docs/deploy.md").read_text()
    listed = re.findall(r"^\| `(Octavo\w+)` \| (\w+) \|", text, re.MULTILINE)
    assert sorted(listed) == sorted({(alert["alert"], alert["labels"]["severity"]) for alert in ALERTS})
