"""The tests of the kernels notice planted faults. The whole list runs in `make kernels`; here, a few of it."""

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


def test_the_tests_pass_on_an_untouched_copy() -> None:
    assert run_tests(None, {test for mutation in QUICK for test in mutation.tests}, {})


@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.name)
def test_a_fault_is_noticed(mutation: Mutation) -> None:
    assert is_caught(mutation, {})
