"""The test data is whole and reads as its README says."""

from tests import data_files


def test_counts_are_as_documented() -> None:
    assert len(data_files.mt_bench_prompts()) == 80
    assert all(len(turns) == 2 for turns in data_files.mt_bench_turns())
    assert len(data_files.gsm8k_prompts()) == 50
    assert len(data_files.humaneval_prompts()) == 40
    assert {lang: len(texts) for lang, texts in data_files.mgsm_prompts().items()} == dict.fromkeys(
        ["en", "es", "fr", "de", "ru", "zh", "ja", "th", "sw", "bn", "te"], 10
    )
    assert len(data_files.emoji()) == 3944
    assert len(data_files.naughty_strings()) == 514
    assert len(data_files.grapheme_tests()) == 766
    assert len(data_files.mixed_prompts()) == 30
    assert len(data_files.benchmark_schemas()) == 371
    assert len(data_files.schema_tests()) == 365
    assert sum(len(row["tests"]) for row in data_files.schema_tests()) == 1856
    assert len(data_files.openai_examples()) == 24
    assert sum(map(len, data_files.openai_fields().values())) == 651
    assert len(data_files.openai_response_events()) == 58


def test_every_file_is_named_in_the_readme() -> None:
    readme = (data_files.DATA_DIR / "README.md").read_text(encoding="utf-8")
    files = [path for path in data_files.DATA_DIR.rglob("*") if path.is_file() and path.name != "README.md"]
    missing = [p for p in files if "LICENSES" not in p.parts and str(p.relative_to(data_files.DATA_DIR)) not in readme]
    assert not missing
