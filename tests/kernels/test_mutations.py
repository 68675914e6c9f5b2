"""The tests of the kernels notice planted faults. The whole list runs in `make kernels`; here, a few of it."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.interpreted import TESTS
from tests.kernels.mutation_check import is_caught, plant, run_tests
from tests.kernels.mutations import MUTATIONS, Mutation

QUICK = [mutation for mutation in MUTATIONS if mutation.is_quick]
MIN_MUTATIONS = 15


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_fault_fits_the_source(mutation: Mutation, tmp_path) -> None:
    path = tmp_path / "mutated.py"
    path.write_text((TESTS.parent / mutation.file).read_text())
    plant(mutation, path)


def test_there_are_enough_faults() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= MIN_MUTATIONS


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Future[bool]]]:
    """Of each fault whether it is noticed, and under "" whether the tests pass without one; side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tests = {test for mutation in QUICK for test in mutation.tests}
        untouched = pool.submit(run_tests, None, tests, {})
        yield {"": untouched} | {mutation.name: pool.submit(is_caught, mutation, {}) for mutation in QUICK}
        pool.shutdown(cancel_futures=True)


def test_the_tests_pass_on_an_untouched_copy(outcomes: dict[str, Future[bool]]) -> None:
    assert outcomes[""].result()


@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.name)
def test_a_fault_is_noticed(mutation: Mutation, outcomes: dict[str, Future[bool]]) -> None:
    assert outcomes[mutation.name].result()
