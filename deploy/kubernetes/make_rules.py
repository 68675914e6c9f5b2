"""Makes the PrometheusRule of components/monitoring from deploy/prometheus/rules.yml, so that both say the same.

`python deploy/kubernetes/make_rules.py`, after each change of the rules; tests/deploy/test_kubernetes.py fails where it
was forgotten. The rules are taken over as text: their comments stay, and no YAML library is needed.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RULES = FOLDER.parent / "prometheus/rules.yml"
PROMETHEUS_RULE = FOLDER / "components/monitoring/rules.yaml"
_HEADER = """\
# Made of deploy/prometheus/rules.yml by deploy/kubernetes/make_rules.py: change that file, and run it.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: octavo
  labels:
    app.kubernetes.io/name: octavo
spec:
"""


def prometheus_rule(rules: str) -> str:
    """The object as YAML, from the text of a rules file."""
    _, mark, groups = rules.partition("\ngroups:\n")
    if not mark:
        raise SystemExit(f"{RULES} has no line `groups:`.")
    return _HEADER + "".join(f"  {line}".rstrip() + "\n" for line in ("groups:", *groups.splitlines()))


if __name__ == "__main__":
    PROMETHEUS_RULE.write_text(prometheus_rule(RULES.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PROMETHEUS_RULE.relative_to(FOLDER.parents[1])} was written.")
