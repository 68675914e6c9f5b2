"""The progress display: plain lines where there is no terminal."""

import pytest

from server.download_progress import terminal_progress


def test_each_stage_is_one_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal_progress() as on_progress:
        for done in (0, 5, 10):
            on_progress("downloading a.whl", done, 10)
        on_progress("waiting", 0, None)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.split("\n") == ["downloading a.whl", "waiting", ""]
