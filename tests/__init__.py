"""The tests, in folders that mirror the packages. A package, so that `tests.data_files` is always ours."""
