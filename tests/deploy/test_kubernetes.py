"""The Kubernetes manifests: what kustomize and the schemas say, and that they agree with the server and its image."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.kubernetes import run_pod
from deploy.kubernetes.make_rules import PROMETHEUS_RULE, RULES, prometheus_rule
from kernels import __version__
from server.config import load_settings
from tests.server.doubles import FakeEngine, client_of, make_app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OVERLAYS = ("cpu", "gpu")
# CustomResourceDefinitions of the Prometheus operator, which have no schema in Kubernetes' own.
OPERATOR_KINDS = {"ServiceMonitor", "PrometheusRule"}


def read(path):
    return yaml.safe_load((FOLDER / path).read_text())


DEPLOYMENT, SERVICE = read("base/deployment.yaml"), read("base/service.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
MONITOR, SCALER = (
    read("components/monitoring/servicemonitor.yaml"),
    read("components/autoscaling/horizontalpodautoscaler.yaml"),
)
SETTINGS = dict(
    line.split("=", 1) for line in (FOLDER / "base/settings.env").read_text().splitlines() if not line.startswith("#")
)


@pytest.fixture(scope="module")
def rendered():
    """Overlay -> its objects, as kustomize makes them."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    objects = {}
    for overlay in OVERLAYS:
        done = subprocess.run(
            ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr  # deprecated fields
        objects[overlay] = list(yaml.safe_load_all(done.stdout))
    return objects


def only(objects, kind):
    [found] = [each for each in objects if each["kind"] == kind]
    return found


# --- with the server and the image ---


def test_the_settings_are_the_servers(monkeypatch, tmp_path):
    keys = tmp_path / "api-keys"
    keys.write_text("team: secret\n")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    settings = load_settings({})
    assert settings.host == "0.0.0.0"
    assert settings.log_format == "json"
    [mount] = [mount for mount in CONTAINER["volumeMounts"] if mount["name"] == "keys"]
    [volume] = [volume for volume in POD["volumes"] if volume["name"] == "keys"]
    [item] = volume["secret"]["items"]
    assert str(settings.api_key_file) == f"{mount['mountPath']}/{item['path']}"


def test_running_requests_may_finish_before_the_pod_is_killed():
    command, pause = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed = int(pause) + int(SETTINGS["OCTAVO_SHUTDOWN_TIMEOUT"]) + 10
    assert POD["terminationGracePeriodSeconds"] >= needed


def test_ports_agree():
    [port] = CONTAINER["ports"]
    assert str(port["containerPort"]) == SETTINGS["OCTAVO_PORT"]
    assert f"\nEXPOSE {port['containerPort']}\n" in DOCKERFILE
    [exposed] = SERVICE["spec"]["ports"]
    assert exposed["targetPort"] == port["name"]
    assert {CONTAINER[probe]["httpGet"]["port"] for probe in PROBES} == {port["name"]}
    assert MONITOR["spec"]["endpoints"][0]["port"] == exposed["name"]
    [rule] = read("base/networkpolicy.yaml")["spec"]["ingress"]
    assert rule["ports"] == [{"port": port["name"]}]


async def test_probes_ask_for_what_there_is():
    """Without a key, because kubelet has none."""
    engine = FakeEngine()
    async with client_of(make_app(engine, api_key=("secret",))) as client:
        for statuses in ((200, 200, 200), (503, 503, 200)):
            asked = [await client.get(CONTAINER[probe]["httpGet"]["path"]) for probe in PROBES]
            assert tuple(answer.status_code for answer in asked) == statuses
            engine.info = None  # it loads
        assert (await client.get(MONITOR["spec"]["endpoints"][0]["path"])).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert (await client.get(MONITOR["spec"]["endpoints"][0]["path"], headers=key)).status_code == 200


def test_busy_processors_are_no_reason_to_kill_a_pod():
    for name in PROBES:
        assert CONTAINER[name]["timeoutSeconds"] >= 5  # of Kubernetes itself, 1
    liveness = CONTAINER["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 120


def test_the_startup_probe_gives_up_before_the_rollout_does():
    for path in ("base/deployment.yaml", "overlays/gpu/deployment.yaml"):
        spec = read(path)["spec"]
        probe = CONTAINER["startupProbe"] | spec["template"]["spec"]["containers"][0]["startupProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] < spec["progressDeadlineSeconds"]


def test_user_cache_and_version_are_those_of_the_image():
    security = POD["securityContext"]
    assert f"\nUSER {security['runAsUser']}:{security['runAsGroup']}\n" in DOCKERFILE
    assert security["fsGroup"] == security["runAsGroup"]
    [cache] = [mount["mountPath"] for mount in CONTAINER["volumeMounts"] if mount["name"] == "cache"]
    assert f'\nVOLUME ["{cache}"]\n' in DOCKERFILE
    assert f"OCTAVO_HOME={cache}/" in DOCKERFILE
    tags = [
        read(f"{path}/kustomization.yaml")["images"][0]["newTag"] for path in ("base", "overlays/cpu", "overlays/gpu")
    ]
    assert tags == [__version__, __version__, f"{__version__}-cuda"]


async def test_the_autoscaler_asks_for_what_the_adapter_makes_of_what_the_server_exports():
    rules = read("components/autoscaling/adapter-values.yaml")["rules"]["custom"]
    assert [metric["pods"]["metric"]["name"] for metric in SCALER["spec"]["metrics"]] == [
        rule["name"]["as"] for rule in rules
    ]
    async with client_of(make_app(FakeEngine())) as client:
        families = text_string_to_metric_families((await client.get("/metrics")).text)
    names = {sample.name for family in families for sample in family.samples}
    assert {rule["seriesQuery"].split("{")[0] for rule in rules} <= names


def test_the_rules_are_those_of_prometheus():
    assert PROMETHEUS_RULE.read_text() == prometheus_rule(RULES.read_text()), "run deploy/kubernetes/make_rules.py"
    assert read("components/monitoring/rules.yaml")["spec"] == yaml.safe_load(RULES.read_text())


def test_the_job_has_the_name_that_the_rules_ask_for():
    assert SERVICE["metadata"]["labels"][MONITOR["spec"]["jobLabel"]] == "octavo"


# --- among each other ---


def test_selectors_match():
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    for selector in (
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        SERVICE["spec"]["selector"],
        read("base/poddisruptionbudget.yaml")["spec"]["selector"]["matchLabels"],
        read("base/networkpolicy.yaml")["spec"]["podSelector"]["matchLabels"],
        POD["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ):
        assert selector
        assert selector.items() <= labels.items()
    assert MONITOR["spec"]["selector"]["matchLabels"].items() <= SERVICE["metadata"]["labels"].items()
    target = SCALER["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (DEPLOYMENT["kind"], DEPLOYMENT["metadata"]["name"])
    assert "replicas" not in DEPLOYMENT["spec"]  # the autoscaler's business


def test_one_secret_has_every_key():
    [admin] = [each for each in CONTAINER["env"] if each["name"] == "OCTAVO_ADMIN_API_KEY"]
    reference = admin["valueFrom"]["secretKeyRef"]
    assert not reference.get("optional"), "without it the server would be open to everyone"
    assert MONITOR["spec"]["endpoints"][0]["authorization"]["credentials"] == reference
    [volume] = [volume for volume in POD["volumes"] if volume["name"] == "keys"]
    assert volume["secret"]["secretName"] == reference["name"]


def test_pods_may_run_where_nothing_privileged_may():
    assert read("base/namespace.yaml")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["automountServiceAccountToken"] is False
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["volumes"]}


def test_the_group_is_not_given_the_cache_again_at_each_start():
    """What others may write to is not used as packed weights: tests/deploy/test_cache_volume.py shows both."""
    assert POD["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


# --- as kustomize makes them ---


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_schemas_of_kubernetes_are_kept(rendered, overlay):
    validator = pytest.importorskip("kubernetes_validate", reason="PyPI: kubernetes-validate")
    versions = ["1.31", validator.latest_version()]  # the oldest that is said to do
    for each in rendered[overlay]:
        if each["kind"] not in OPERATOR_KINDS:
            for version in versions:
                validator.validate(each, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_kind_of_object_is_there_and_in_the_namespace(rendered, overlay):
    kinds = sorted(each["kind"] for each in rendered[overlay])
    expected = {
        *("ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Namespace", "NetworkPolicy", "PodDisruptionBudget"),
        *("PrometheusRule", "Service", "ServiceAccount", "ServiceMonitor"),
        *(["PersistentVolumeClaim"] if overlay == "gpu" else []),
    }
    assert kinds == sorted(expected)
    for each in rendered[overlay]:
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "octavo"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pod_gets_the_settings_by_the_name_of_their_content(rendered, overlay):
    settings = only(rendered[overlay], "ConfigMap")
    [container] = only(rendered[overlay], "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    assert re.fullmatch(r"octavo-settings-\w+", settings["metadata"]["name"])
    assert SETTINGS.keys() <= settings["data"].keys()
    assert settings["data"].get("OCTAVO_DEVICE") == ("cuda" if overlay == "gpu" else None)


def test_the_shared_cache_takes_the_place_of_the_pods_own(rendered):
    pods = {overlay: only(rendered[overlay], "Deployment")["spec"]["template"]["spec"] for overlay in OVERLAYS}
    caches = {name: next(v for v in pod["volumes"] if v["name"] == "cache") for name, pod in pods.items()}
    assert set(caches["cpu"]) == {"name", "ephemeral"}
    claim = only(rendered["gpu"], "PersistentVolumeClaim")
    assert caches["gpu"] == {"name": "cache", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_only_pods_of_the_gpu_overlay_ask_for_a_card(rendered):
    limits = {
        overlay: only(rendered[overlay], "Deployment")["spec"]["template"]["spec"]["containers"][0]["resources"][
            "limits"
        ]
        for overlay in OVERLAYS
    }
    assert "nvidia.com/gpu" not in limits["cpu"]
    assert limits["gpu"]["nvidia.com/gpu"] == "1"


def test_the_pod_that_podman_runs_is_the_overlays(rendered):
    """But for its image and port, and what podman has no other way for."""
    text = yaml.safe_dump_all(rendered["cpu"])
    keys, *objects = run_pod.manifest(text, "some:image", 12345)
    expected = only(rendered["cpu"], "Deployment")["spec"]["template"]
    played = only(objects, "Deployment")["spec"]["template"]
    for template in (expected, played):
        [container] = template["spec"]["containers"]
        for field in ("image", "env"):
            del container[field]
        container["ports"][0].pop("hostPort", None)
        template["spec"]["volumes"] = [v for v in template["spec"]["volumes"] if v["name"] not in ("cache", "keys")]
    assert played == expected
    assert only(objects, "ConfigMap")["data"] == only(rendered["cpu"], "ConfigMap")["data"]
    assert keys["data"].keys() == {"api-keys"}
