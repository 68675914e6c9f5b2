"""`make kernels`: everything that can be known of the kernels without a GPU, in one table, on two releases of Triton.

Runs every interpreted test, compiles every instance for every target, plants every fault; all in processes of their
own, since each needs another environment. Ends with an error if anything failed. Says nothing of speed.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.interpreted import TESTS, interpreted_files, run_interpreted
from tests.kernels import compile_checks
from tests.kernels.compile_for import TARGETS, Resources
from tests.kernels.kernel_launches import Instance
from tests.kernels.mutation_check import MutationError, is_caught, run_tests
from tests.kernels.mutations import MUTATIONS, Mutation

ROOT = TESTS.parent
EVERY_TEST = ("-m", "full or not full")
HOST = "host"  # the "target" of what is not a kernel: the planner and the launch code


@dataclass(frozen=True, slots=True)
class Triton:
    """One installation of Triton."""

    version: str
    python_path: str  # put first on the path of child processes; "" = the installed one

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join(filter(None, (self.python_path, os.environ.get("PYTHONPATH", ""))))}


@dataclass(slots=True)
class Findings:
    """What the jobs found out, by release of Triton."""

    instances: dict[tuple[str, str], list[Instance]] = field(default_factory=dict)  # (release, target) -> compiled
    passed_tests: Counter[tuple[str, str]] = field(default_factory=Counter)  # (release, kernel) -> tests that launch it
    num_passed: Counter[str] = field(default_factory=Counter)  # release -> tests
    caught: Counter[tuple[str, str]] = field(default_factory=Counter)  # (release, kernel) -> faults
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Findings") -> None:
        self.instances |= other.instances
        self.passed_tests += other.passed_tests
        self.num_passed += other.num_passed
        self.caught += other.caught
        self.failures += other.failures


Job = Callable[[], Findings]


def find_triton(python_path: str) -> Triton:
    """The release that a child process with this path imports."""
    triton = Triton("", python_path)
    command = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    environment = {**os.environ, **triton.environment}
    version = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return dataclasses.replace(triton, version=version.strip())


def test_job(triton: Triton, path: Path) -> Job:
    """Runs one file under the interpreter."""

    def run() -> Findings:
        findings = Findings()
        with tempfile.NamedTemporaryFile(suffix=".json") as counts:
            arguments = ["-p", "tests.kernels.launch_counts", *EVERY_TEST, str(path)]
            result = run_interpreted(arguments, KERNEL_LAUNCHES=counts.name, **triton.environment)
            launches = json.loads(Path(counts.name).read_text() or "{}")
        if result.returncode != 0:
            name = path.relative_to(ROOT)
            findings.failures.append(f"Triton {triton.version}: {name}: {result.stdout[-3000:]}{result.stderr[-1000:]}")
        found = re.search(r"(\d+) passed", result.stdout)
        release = compile_checks.release(triton.version)
        findings.num_passed[release] += int(found[1]) if found else 0
        for kernel, count in launches.items():
            findings.passed_tests[release, kernel] += count
        return findings

    return run


def compile_job(triton: Triton, target: str) -> Job:
    """Compiles everything for one target."""

    def run() -> Findings:
        findings = Findings()
        command = [sys.executable, "-m", "tests.kernels.kernel_launches", target]
        environment = {**os.environ, **triton.environment, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            findings.failures.append(f"Triton {triton.version}: compiling for {target}: {result.stderr[-3000:]}")
        instances = [Instance.from_json(line) for line in result.stdout.splitlines()]
        findings.instances[compile_checks.release(triton.version), target] = instances
        return findings

    return run


def mutation_job(triton: Triton, mutation: Mutation) -> Job:
    """Plants one fault."""

    def run() -> Findings:
        findings = Findings()
        try:
            caught = is_caught(mutation, triton.environment)
        except MutationError as error:
            findings.failures.append(f"Triton {triton.version}: {error}")
            return findings
        if caught:
            findings.caught[compile_checks.release(triton.version), mutation.kernel] += 1
        else:
            findings.failures.append(f"Triton {triton.version}: no test notices the fault {mutation.name!r}")
        return findings

    return run


def untouched_job(triton: Triton) -> Job:
    """Runs the tests that are to notice the faults without any: else what they notice might be the copy."""

    def run() -> Findings:
        findings = Findings()
        tests = sorted({test for mutation in MUTATIONS for test in mutation.tests})
        if not run_tests(None, tests, triton.environment):
            findings.failures.append(f"Triton {triton.version}: the tests fail on a copy of the tree without a fault")
        return findings

    return run


def run_jobs(jobs: list[tuple[str, Job]], console: Console) -> Findings:
    """Run them, as many at once as there are cores."""
    findings = Findings()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        task = progress.add_task("kernels", total=len(jobs))
        pending = {pool.submit(job): name for name, job in jobs}
        for done in as_completed(pending):
            findings.add(done.result())
            progress.update(task, advance=1)
            progress.console.print(f"[dim]{pending[done]}[/dim]")
    return findings


def check_instances(findings: Findings, budget: compile_checks.Budget) -> None:
    """Add what is wrong with the compiled kernels to the failures."""
    for (release, target), instances in sorted(findings.instances.items()):
        recorded = compile_checks.recorded_registers(budget, release, target)
        for instance in instances:
            for complaint in compile_checks.complaints(instance, target, recorded):
                findings.failures.append(f"Triton {release}: {target}: {instance.name}: {complaint}")


def record_budget(findings: Findings, path: Path = compile_checks.REGISTER_BUDGET) -> None:
    """Write what the kernels take now as the most that they may take from now on."""
    budget = compile_checks.read_budget(path)
    for (release, target), instances in findings.instances.items():
        registers = {instance.name: instance.resources.registers for instance in instances}
        budget.setdefault(release, {})[target] = registers
    compile_checks.write_budget(budget, path)


def make_table(findings: Findings, tritons: Iterable[Triton]) -> Table:
    """A row for each kernel instance and target, the releases of Triton beside each other."""
    releases = [compile_checks.release(triton.version) for triton in tritons]
    titles = " / ".join(releases)
    table = Table(title=f"Kernels on Triton {titles}", caption="numbers beside each other: one for each release")
    for name in ("kernel", "target"):
        table.add_column(name, no_wrap=True)
    for name in ("registers", "shared memory", "spills", "tests passed", "mutations caught"):
        table.add_column(name, justify="right", no_wrap=True)
    planted = Counter(mutation.kernel for mutation in MUTATIONS)
    rows = instance_rows(findings)
    for kernel in sorted(planted.keys() | {instance.kernel for instance in rows.values()}):
        counts = [
            " / ".join(str(findings.passed_tests[release, kernel]) for release in releases),
            " / ".join(f"{findings.caught[release, kernel]} of {planted[kernel]}" for release in releases),
        ]
        mine = sorted(key for key, instance in rows.items() if instance.kernel == kernel)
        if not mine:
            table.add_row(kernel, HOST, "", "", "", *counts)
        for index, (name, target) in enumerate(mine):
            taken = [found_resources(findings, release, target, name) for release in releases]
            table.add_row(
                name,
                target,
                " / ".join(str(each.registers) if each else "-" for each in taken),
                " / ".join(f"{each.shared_bytes / 1024:.0f} KiB" if each else "-" for each in taken),
                " / ".join(str(each.num_spills or each.spill_bytes) if each else "-" for each in taken),
                *(counts if index == 0 else ("", "")),
            )
        table.add_section()
    return table


def instance_rows(findings: Findings) -> dict[tuple[str, str], Instance]:
    """(name, target) -> an instance of that name, of any release."""
    return {
        (instance.name, target): instance
        for (_, target), instances in findings.instances.items()
        for instance in instances
    }


def found_resources(findings: Findings, release: str, target: str, name: str) -> Resources | None:
    found = [each.resources for each in findings.instances.get((release, target), []) if each.name == name]
    return found[0] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other-triton", default="", help="folder with another release of Triton, to check too")
    parser.add_argument("--only", default="", help="a pattern of jobs, as they are listed; the others are left out")
    parser.add_argument("--record", action="store_true", help="record the registers taken now as the budget")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    paths = [""] + ([str(Path(arguments.other_triton).resolve())] if arguments.other_triton else [])
    tritons = [find_triton(path) for path in paths]
    jobs = []
    for triton in tritons:
        version = triton.version
        jobs += [(f"{version}: compile for {target}", compile_job(triton, target)) for target in TARGETS]
        jobs += [(f"{version}: {path.relative_to(TESTS)}", test_job(triton, path)) for path in interpreted_files()]
        jobs.append((f"{version}: no fault", untouched_job(triton)))
        jobs += [(f"{version}: fault: {mutation.name}", mutation_job(triton, mutation)) for mutation in MUTATIONS]
    findings = run_jobs([(name, job) for name, job in jobs if re.search(arguments.only, name)], console)
    if arguments.record:
        record_budget(findings)
    check_instances(findings, compile_checks.read_budget())
    console.print(make_table(findings, tritons))
    for triton in tritons:
        release = compile_checks.release(triton.version)
        num_caught = sum(findings.caught[release, kernel] for kernel in {mutation.kernel for mutation in MUTATIONS})
        num_compiled = sum(len(found) for (each, _), found in findings.instances.items() if each == release)
        console.print(
            f"Triton {triton.version}: {num_compiled} kernels compiled, {findings.num_passed[release]} tests passed, "
            f"{num_caught} of {len(MUTATIONS)} faults caught"
        )
    for failure in findings.failures:
        console.print(f"[red]FAILED[/red] {failure}", markup=True, highlight=False)
    sys.exit(bool(findings.failures))


if __name__ == "__main__":
    main()
