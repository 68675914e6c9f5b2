"""The rules of the design that a program can check: import edges, sizes, names, and what stays free of torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "models", "scheduler", "paged_cache", "kernels")
OURS = {*PACKAGES, "tests", "benchmarks"}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

# What each package may import of the others; a prefix allows the module and everything under it.
ALLOWED = {
    "server": ("models", "scheduler", "paged_cache", "kernels"),
    "models": (
        "kernels",
        "paged_cache.spec",
        "paged_cache.kv_cache",
        "scheduler.output",
        "scheduler.sampling_params",
    ),
    "scheduler": (
        "paged_cache.manager",
        "paged_cache.block_table",
        "paged_cache.block_pool",
        "paged_cache.prefix_cache",
        "paged_cache.spec",
    ),
    "paged_cache": (),
    "kernels": (),
}
ALLOWED_FOR_FILE = {"paged_cache/kv_cache.py": ("kernels",)}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)} uses a relative import"
            found.add(node.module)
    return found


def functions(path: Path) -> list[tuple[str, int]]:
    """Name and number of lines of every function of a file."""
    return [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def test_there_are_files_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_follow_the_planes(path):
    package = path.relative_to(ROOT).parts[0]
    allowed = (package, *ALLOWED[package], *ALLOWED_FOR_FILE.get(relative(path), ()))
    for module in imports(path):
        if module.split(".")[0] in OURS:
            assert any(module == prefix or module.startswith(prefix + ".") for prefix in allowed), (
                f"{relative(path)} imports {module}; {package} may import only {allowed}"
            )


def test_only_the_engine_sees_both_scheduler_and_runner():
    seeing = {relative(p) for p in FILES if {"scheduler.scheduler", "models.runner"} <= imports(p)}
    assert seeing == {"server/engine.py"}


def test_only_the_device_plane_imports_torch():
    for path in FILES:
        package = path.relative_to(ROOT).parts[0]
        if package == "scheduler" or (package == "paged_cache" and path.name != "kv_cache.py"):
            assert not any(module.split(".")[0] in ("torch", "triton") for module in imports(path)), relative(path)


def test_only_the_settings_read_the_environment():
    for path in FILES:
        if relative(path) == "server/config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in ("environ", "getenv"), f"{relative(path)} reads the environment"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_and_functions_stay_small(path):
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{relative(path)} has {num_lines} lines"
    if path.relative_to(ROOT).parts[0] == "kernels":
        return
    for name, length in functions(path):
        assert length <= MAX_FUNCTION_LINES, f"{relative(path)}: {name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_file_says_what_it_owns(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{relative(path)} has no docstring"
    # server/errors.py draws the tree of exceptions there.
    if relative(path) != "server/errors.py":
        assert len(docstring.splitlines()) <= 8, f"{relative(path)} opens with more than a few lines"


def test_no_file_is_called_utils():
    assert not [relative(path) for path in FILES if path.stem in ("utils", "util", "helpers", "common", "misc")]


def run_python(code: str) -> str:
    """Run code in a fresh interpreter at the root and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_scheduler_loads_no_torch():
    assert run_python("import scheduler.scheduler, sys; print('torch' in sys.modules)") == "False"


def test_importing_the_edge_loads_no_torch():
    assert run_python("import server.serve, sys; print('torch' in sys.modules)") == "False"
