"""Tells whether the server in this container is ready: exit code 0, or 1 and a line that says why not.

`python healthcheck.py [--live]`; with --live it is enough that the event loop answers. Neither wants a key. The address
is the server's: from the flags that process 1 was given, the variables, the settings file, in this order. The standard
library only, and nothing of ours: it runs every few seconds, beside what it asks.
"""

import http.client
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READY_PATH = "/health/ready"
LIVE_PATH = "/health/live"
FIRST_PROCESS = Path("/proc/1/cmdline")
_NAMES = ("config", "host", "port")
_DEFAULT_PORT = 8000
_SECONDS = 4.0  # less than the image's HEALTHCHECK gives, so that the reason is told
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to ask a server that listens everywhere


def settings_of(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """What is known of the server's settings; the first source of a setting counts. Raises OSError, ValueError."""
    known = {name.upper(): value for name, value in environment.items()}  # the server minds no case either
    variables = {name: known.get(f"OCTAVO_{name.upper()}", "") for name in _NAMES}
    if "://" in variables["port"]:  # Kubernetes describes a service called octavo so; the server ignores it as well
        del variables["port"]
    flags: dict[str, Any] = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, has_value, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in _NAMES:
            flags[name] = value if has_value else following
    given = {**{name: value for name, value in variables.items() if value}, **flags}
    if not given.get("config"):
        return given
    file = tomllib.loads(Path(given["config"]).expanduser().read_text(encoding="utf-8"))
    return {**{key.replace("-", "_"): value for key, value in file.items()}, **given}


def address_of(settings: Mapping[str, Any]) -> tuple[str, int]:
    """Host and port to ask. Raises ValueError where the server chose the port itself."""
    host = str(settings.get("host", "127.0.0.1"))
    port = str(settings.get("port", _DEFAULT_PORT))
    if int(port) == 0:
        raise ValueError("the server took a free port, which is not known here: give it one with OCTAVO_PORT")
    return _LOOPBACK.get(host, host), int(port)


def ask(path: str, host: str, port: int) -> str | None:
    """The reason why the server does not answer `path` with 200; None where it does. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(4096)
    finally:
        connection.close()
    if answer.status == 200:
        return None
    try:
        return f"{path} answered {answer.status}: {json.loads(body)['status']}"
    except (ValueError, KeyError, TypeError):
        return f"{path} answered {answer.status}"


def main(arguments: Sequence[str]) -> int:
    """Ask once; returns the exit code."""
    if list(arguments) not in ([], ["--live"]):
        print("usage: healthcheck.py [--live]", file=sys.stderr)
        return 2
    try:
        command = FIRST_PROCESS.read_bytes().decode(errors="replace").split("\0")
        host, port = address_of(settings_of(command, os.environ))
        reason = ask(LIVE_PATH if arguments else READY_PATH, host, port)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = f"not answered: {error or type(error).__name__}"
    print(reason or "ready")
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
