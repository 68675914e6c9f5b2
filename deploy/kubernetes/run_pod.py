"""Runs the pod of overlays/cpu for real, without a cluster: `run_pod.py --image octavo:0.1.0`, by podman's `kube play`.

Readiness as the probe asks for it, keys, who it runs as, what it may write to, draining, and a second start with the
first one's cache. Prints a table; ends with 1 if a check fails, with 2 where a tool is missing. Needs root. What podman
cannot do is put in another way: Secrets, claims made with the pod, and the pause before SIGTERM.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: Python has put this folder on the path, not the repository's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.server_process import free_port
from kernels import __version__

OVERLAY = Path(__file__).resolve().parent / "overlays/cpu"
ADMIN_KEY, KEY = "key-of-the-one-who-watches", "key-of-a-team"
POD, CONTAINER = "octavo-pod-0", "octavo-pod-0-octavo"  # as podman names a Deployment's first one
VOLUME, KEYS = "octavo-try-cache", "octavo-try-keys"
_READY_SECONDS = 300.0
_OPEN_FOLDER = 0o2775  # as Kubernetes leaves the top folder of a volume for the group of `fsGroup`


class Missing(RuntimeError):
    """Something that this needs is not here."""


class Failed(RuntimeError):
    """A check did not find what it should; the message says what it found."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One that runs."""

    probe: str  # the readiness probe's path
    grace_seconds: int  # from SIGTERM to SIGKILL
    user: str
    url: str
    cache: Path  # where its volume lies on this machine

    def client(self, key: str | None) -> httpx.Client:
        """One that sends this key."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)


def attempt(*command: str) -> tuple[bool, str]:
    """Whether a command succeeds, and all that it says."""
    done = subprocess.run(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode == 0, done.stdout.strip()


def run(*command: str) -> str:
    """What a command prints. Raises Failed with its complaint."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise Failed(f"{' '.join(command[:3])}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def manifest(rendered: str, image: str, port: int) -> list[dict[str, Any]]:
    """The objects that `kube play` is given, from what kustomize made."""
    objects = [each for each in yaml.safe_load_all(rendered) if each["kind"] in ("ConfigMap", "Deployment")]
    for each in objects:
        del each["metadata"]["namespace"]  # podman has none
        if each["kind"] == "Deployment":
            pod = each["spec"]["template"]["spec"]
            [container] = pod["containers"]
            container["image"] = image
            container["ports"][0]["hostPort"] = port
            container["env"] = [{"name": "OCTAVO_ADMIN_API_KEY", "value": ADMIN_KEY}]
            others = {"cache": {"persistentVolumeClaim": {"claimName": VOLUME}}, "keys": {"configMap": {"name": KEYS}}}
            pod["volumes"] = [
                {"name": v["name"], **others[v["name"]]} if v["name"] in others else v for v in pod["volumes"]
            ]
    keys = {"api-keys": f"team:{KEY}\n"}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": KEYS}, "data": keys}, *objects]


def fill_cache(models: Path, user: str) -> Path:
    """Make the volume, put models into it, and give it to the pod's user; returns where it lies."""
    run("podman", "volume", "create", VOLUME)
    folder = Path(run("podman", "volume", "inspect", VOLUME, "--format", "{{.Mountpoint}}"))
    if models.is_dir():
        shutil.copytree(models, folder / "octavo/models")
    run("chown", "--recursive", user, str(folder))
    folder.chmod(_OPEN_FOLDER)
    return folder


@contextmanager
def playing(image: str, models: Path) -> Iterator[Pod]:
    """The pod, until it is taken down with all that belongs to it. Raises Failed."""
    port = free_port()
    objects = manifest(run("kubectl", "kustomize", str(OVERLAY)), image, port)
    [spec] = [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"]
    user = "{runAsUser}:{runAsGroup}".format(**spec["securityContext"])
    [container] = spec["containers"]
    probe = container["readinessProbe"]["httpGet"]["path"]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all(objects, file)
        file.flush()
        try:
            cache = fill_cache(models, user)
            run("podman", "kube", "play", file.name)
            yield Pod(probe, spec["terminationGracePeriodSeconds"], user, f"http://127.0.0.1:{port}", cache)
        finally:
            attempt("podman", "pod", "rm", "--force", POD)
            attempt("podman", "volume", "rm", "--force", VOLUME, KEYS)


# --- the checks: each returns what it saw, and raises Failed ---


def probed(pod: Pod) -> tuple[bool, str]:
    """Whether the readiness probe would succeed, and what it is told."""
    try:
        with pod.client(None) as client:
            answer = client.get(pod.probe)
    except httpx.HTTPError as error:  # it does not listen yet
        return False, str(error)
    return answer.is_success, f"{answer.status_code} {answer.text}"


def becomes_ready(pod: Pod) -> str:
    """What the readiness probe asks for, without a key, until the answer is 200."""
    begin = time.monotonic()
    while True:
        is_ready, said = probed(pod)
        seconds = time.monotonic() - begin
        if is_ready:
            return f"after {seconds:.0f} s: {said}"
        state = run("podman", "inspect", CONTAINER, "--format", "{{.State.Status}}")
        if seconds > _READY_SECONDS or state != "running":
            _, log = attempt("podman", "logs", "--tail", "5", CONTAINER)
            raise Failed(f"{state} and not ready: {said}; its log ends with {log}")
        time.sleep(1)


def asks_for_keys(pod: Pod) -> str:
    """Liveness for everyone, models for holders of keys, metrics for the admin."""
    expected = {
        ("/health/live", None): 200,
        ("/v1/models", None): 401,
        ("/v1/models", KEY): 200,
        ("/metrics", KEY): 403,
        ("/metrics", ADMIN_KEY): 200,
    }
    found = {}
    for path, key in expected:
        with pod.client(key) as client:
            found[path, key] = client.get(path).status_code
    if found != expected:
        raise Failed(f"answered {found}")
    return ", ".join(f"{path} {status}" for (path, _), status in found.items())


def has_no_privileges(pod: Pod) -> str:
    """User, capabilities, and where it may write."""
    user = run("podman", "exec", CONTAINER, "sh", "-c", "echo $(id -u):$(id -g)")
    capabilities = run("podman", "exec", CONTAINER, "sh", "-c", "grep CapEff /proc/1/status | cut -f2")
    _, refused = attempt("podman", "exec", CONTAINER, "sh", "-c", "touch /opt/octavo/x /x /tmp/x /cache/x")
    lines = [line for line in refused.splitlines() if line.startswith("touch:")]
    if user != pod.user or int(capabilities, 16) or len(lines) != 2 or "'/x': Read-only" not in refused:
        raise Failed(f"runs as {user} with capabilities {capabilities}; writing: {refused}")
    return f"{user}, no capability, writes to /tmp and /cache alone"


def drains(pod: Pod) -> str:
    """SIGTERM while an answer streams: it comes to its end, and the process exits with 0."""
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with pod.client(KEY) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        stopping = Thread(target=run, args=("podman", "stop", "--time", str(pod.grace_seconds), CONTAINER))
        stopping.start()
        events = [line for line in lines if line]
        stopping.join()
    code = run("podman", "inspect", CONTAINER, "--format", "{{.State.ExitCode}}")
    if events[-1] != "data: [DONE]" or code != "0":
        raise Failed(f"the stream ended with {events[-1]}, the process with {code}")
    return f"{len(events)} more events came, then exit code {code}"


def packed_files(pod: Pod) -> dict[str, tuple[int, int]]:
    """The packed weights in the cache: when they were written, and their modes."""
    files = (pod.cache / "octavo/packed").glob("*.safetensors")
    return {file.name: (file.stat().st_ino, file.stat().st_mode & 0o777) for file in files}


def starts_with_its_cache(pod: Pod) -> str:
    """A second start reads the packed weights of the first one."""
    before = packed_files(pod)
    if not before:
        raise Failed(f"nothing was packed in {pod.cache}")
    run("podman", "start", CONTAINER)
    ready = becomes_ready(pod)
    _, log = attempt("podman", "logs", CONTAINER)
    if packed_files(pod) != before or "are not used" in log:
        raise Failed(f"packed {before}, then {packed_files(pod)}")
    return f"{ready}, the same packed weights"


CHECKS: tuple[Callable[[Pod], str], ...] = (
    *(becomes_ready, asks_for_keys, has_no_privileges, drains, starts_with_its_cache),
)


def checked(pod: Pod) -> list[tuple[str, bool, str]]:
    """Every check in its order, up to the first that fails: name, whether it is right, and what was seen."""
    rows = []
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            rows.append((name, True, check(pod)))
        except (Failed, httpx.HTTPError) as failure:
            rows.append((name, False, str(failure)))
            break
    return rows


def require(image: str) -> None:
    """Raises Missing."""
    for tool in ("podman", "kubectl"):
        if shutil.which(tool) is None:
            raise Missing(f"there is no {tool}")
    if os.geteuid() != 0:
        raise Missing("the volume is given to the pod's user, which only root can do")
    has_image, _ = attempt("podman", "image", "exists", image)
    if not has_image:
        raise Missing(f"podman has no image {image}; build it, or name another with --image")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", default=f"octavo:{__version__}", help="that podman has (default: %(default)s)")
    parser.add_argument(
        "--models",
        type=Path,
        default=Path("~/.cache/octavo/models").expanduser(),
        help="folder of models to put into the cache, so that none is downloaded (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        require(options.image)
        with playing(options.image, options.models) as pod:
            rows = checked(pod)
    except Missing as missing:
        print(f"Not checked: {missing}.", file=sys.stderr)
        return 2
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    table = Table("The pod", "Result", "What was seen")
    for name, is_right, seen in rows:
        table.add_row(name, "ok" if is_right else "wrong", seen)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0 if all(is_right for _, is_right, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
