"""A package index and a model hub on loopback, for the model store's tests. Routes are functions of the handler."""

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from server.packaged_models import PackagedModel, Wheel, WheelMember


@dataclass
class LocalServer:
    """A running server: its address, what it answers, what it was asked."""

    routes: dict[str, Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def add(self, path: str, body: bytes, content_type: str = "application/octet-stream", **headers: str) -> None:
        """Answer GET and HEAD of `path` with `body`."""

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Type", content_type)
            handler.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.end_headers()
            if handler.command != "HEAD":
                handler.wfile.write(body)

        self.routes[path] = answer


@contextmanager
def running_server() -> Iterator[LocalServer]:
    """Serve on a free port of loopback until the block ends."""
    local = LocalServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            local.requests.append(f"{self.command} {path}")
            if path in local.routes:
                local.routes[path](self)
            else:
                body = b'{"error": "Repository not found"}'
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    local.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield local
    finally:
        server.shutdown()
        server.server_close()


def build_wheel(project: str, members: dict[str, bytes]) -> tuple[Wheel, bytes]:
    """A wheel of version 1.0 that an installer accepts, and its pin. It needs a package that does not exist."""
    package = project.replace("-", "_")
    info = f"{package}-1.0.dist-info"
    members = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n"
        "Requires-Dist: no-such-package-octavo-test\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in members.items():
            archive.writestr(zipfile.ZipInfo(path), content)
    data = buffer.getvalue()
    wheel = Wheel(project, "1.0", f"{package}-1.0-py3-none-any.whl", len(data), hashlib.sha256(data).hexdigest())
    return wheel, data


@dataclass
class FakeModel:
    """A model in two part wheels and a notice wheel, its content, and the wheels' bytes by file name."""

    model: PackagedModel
    content: bytes
    wheels: dict[str, tuple[Wheel, bytes]]

    def publish(self, local: LocalServer, page: str = "json") -> None:
        """Put the wheels on the index as its simple pages (`json` or `html`)."""
        for file_name, (wheel, data) in self.wheels.items():
            local.add(f"/files/{file_name}", data)
            if page == "json":
                files = [{"filename": "other-0.1.tar.gz", "url": "/files/other-0.1.tar.gz"}]
                files.append({"filename": file_name, "url": f"../../files/{file_name}"})
                body = json.dumps({"meta": {"api-version": "1.1"}, "name": wheel.project, "files": files}).encode()
                local.add(f"/simple/{wheel.project}/", body, "application/vnd.pypi.simple.v1+json")
            else:
                link = f'<a href="/files/x.whl">x</a><a href="/files/{file_name}#sha256=00">{file_name}</a>'
                local.add(f"/simple/{wheel.project}/", f"<html>{link}</html>".encode(), "text/html")


def build_model() -> FakeModel:
    """About 600 kB of a made-up model."""
    content = b"GGUF" + b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(20_000))
    middle = len(content) // 2
    first, first_data = build_wheel("fake-part1", {"fake_part1/f.gguf.part00": content[:middle]})
    second, second_data = build_wheel("fake-part2", {"fake_part2/f.gguf.part01": content[middle:]})
    notices, notices_data = build_wheel("fake-notices", {"fake/TERMS.html": b"the terms"})
    model = PackagedModel(
        name="fake",
        title="A made-up model",
        file_name="f.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        parts=(WheelMember(first, "fake_part1/f.gguf.part00"), WheelMember(second, "fake_part2/f.gguf.part01")),
        notices=(WheelMember(notices, "fake/TERMS.html"),),
    )
    pairs = [(first, first_data), (second, second_data), (notices, notices_data)]
    return FakeModel(model, content, {wheel.file_name: (wheel, data) for wheel, data in pairs})
