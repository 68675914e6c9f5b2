"""What a result says about where it came from."""

import json

from benchmarks.machine import ROOT, command_line, machine_facts, write_result


def test_facts_are_all_known_and_go_into_json(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    facts = machine_facts()
    assert all(facts[name] for name in ("date", "cpu", "cores", "memory_gib", "torch", "commit"))
    assert facts["thread_variables"]["OMP_NUM_THREADS"] == "1"
    write_result(tmp_path / "new" / "result.json", facts)
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == facts


def test_command_names_the_script_from_the_root():
    assert command_line([str(ROOT / "benchmarks/x.py"), "--url", "a b"]) == "python benchmarks/x.py --url 'a b'"


def test_command_tells_no_folder_outside_the_repository(tmp_path):
    assert command_line([str(tmp_path / "x.py")]) == "python x.py"
