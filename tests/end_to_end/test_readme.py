"""What the README prints works as printed, but for the port."""

import re
import subprocess
import sys

from server.config import Settings, flag_of
from server.load_test.options import build_parser as load_test_parser
from tests.end_to_end.server_process import ROOT

README = (ROOT / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def block(language, containing):
    """The one code block of a language that contains a text."""
    [found] = [code for code in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in code]
    return found


def test_the_curl_streams_an_answer(smollm2):
    command = block("console", "curl").replace(ADDRESS, smollm2.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("data: ") > 3
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_the_python_snippet_prints_an_answer(smollm2):
    code = block("python", "OpenAI").replace(ADDRESS, smollm2.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip()


def test_every_flag_that_is_named_exists():
    known = {flag_of(name) for name in Settings.model_fields} | {"--config", "--home"}
    switches = {name for name, field in Settings.model_fields.items() if isinstance(field.default, bool)}
    known |= {flag_of(f"no_{name}") for name in switches}
    known |= set(re.findall(r"--[a-z][a-z0-9-]+", load_test_parser("octavo load-test").format_help()))
    assert set(re.findall(r"`(--[a-z-]+)", README)) <= known
