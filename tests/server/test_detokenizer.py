"""The detokenizer against a whole-text oracle, for any tokens, any stop strings and any cutting."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.detokenizer import Detokenizer
from tests import data_files
from tests.server.real_tokenizers import gemma3, smollm2
from tests.server.text_oracle import decoded_so_far, whole_text


def made_up_tokenizer(pieces: Sequence[bytes], special_ids: frozenset[int] = frozenset()) -> Any:
    """Token i has the bytes `pieces[i]`."""
    return SimpleNamespace(token_bytes=lambda token_id: pieces[token_id], special_token_ids=special_ids)


def pending_chars(text: str, stops: Sequence[str]) -> int:
    """How long a tail is a proper prefix of some stop."""
    prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((length for length in range(1, len(text) + 1) if text[-length:] in prefixes), default=0)


def stream(detokenizer: Detokenizer, pushes: Sequence[Sequence[int]]) -> str:
    return "".join(detokenizer.push(ids).text for ids in pushes) + detokenizer.finish()


ALPHABET = "abé日😀\ufffd"
TEXT_PIECES = st.text(ALPHABET, max_size=4).map(str.encode)
BROKEN_PIECES = st.lists(
    st.sampled_from([0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0x61]), max_size=3
)
PIECES = st.lists(st.one_of(TEXT_PIECES, BROKEN_PIECES.map(bytes)), max_size=14)
STOPS = st.lists(st.text("ab日\ufffd", max_size=5), max_size=4)


@st.composite
def cut_sequences(draw: st.DrawFn) -> tuple[list[bytes], list[list[int]]]:
    """Token bytes, and the ids 0, 1, 2 ... cut into pushes (some empty)."""
    pieces = draw(PIECES)
    cuts = sorted(draw(st.lists(st.integers(0, len(pieces)), max_size=6)))
    bounds = zip([0, *cuts], [*cuts, len(pieces)], strict=True)
    return pieces, [list(range(start, end)) for start, end in bounds]


@settings(max_examples=700, deadline=None)
@given(sequence=cut_sequences(), stops=STOPS, include_stop=st.booleans(), min_tokens=st.integers(0, 6))
def test_joined_steps_are_the_whole_text(
    sequence: tuple[list[bytes], list[list[int]]], stops: list[str], include_stop: bool, min_tokens: int
) -> None:
    pieces, pushes = sequence
    detokenizer = Detokenizer(made_up_tokenizer(pieces), stops, include_stop, min_tokens=min_tokens)
    text = stream(detokenizer, pushes)
    data = b"".join(pieces)
    # What the first `min_tokens` tokens complete ends nothing.
    num_spared = len(decoded_so_far(b"".join(pieces[:min_tokens])))
    if len(pieces) < min_tokens:
        num_spared = len(data.decode("utf-8", "replace"))
    assert (text, detokenizer.stopped) == whole_text(data, stops, include_stop, num_spared)


@settings(max_examples=600, deadline=None)
@given(sequence=cut_sequences(), stops=STOPS, min_tokens=st.integers(0, 6))
def test_no_more_is_held_back_than_must_be(
    sequence: tuple[list[bytes], list[list[int]]], stops: list[str], min_tokens: int
) -> None:
    pieces, pushes = sequence
    detokenizer = Detokenizer(made_up_tokenizer(pieces), stops, min_tokens=min_tokens)
    sent, data = "", b""
    for ids in pushes:
        step = detokenizer.push(ids)
        sent += step.text
        if step.stopped is not None:
            break
        data += b"".join(pieces[i] for i in ids)
        decoded = decoded_so_far(data)
        assert sent == decoded[: len(decoded) - pending_chars(decoded, stops)]


@settings(max_examples=300, deadline=None)
@given(sequence=cut_sequences(), stops=STOPS)
def test_offsets_count_the_characters_before_each_token(
    sequence: tuple[list[bytes], list[list[int]]], stops: list[str]
) -> None:
    pieces, pushes = sequence
    detokenizer = Detokenizer(made_up_tokenizer(pieces), stops)
    offsets = [offset for ids in pushes for offset in detokenizer.push(ids).token_offsets]
    expected = [len(decoded_so_far(b"".join(pieces[:i]))) for i in range(len(offsets))]
    assert offsets == expected
    if detokenizer.stopped is None:
        assert len(offsets) == len(pieces)
    else:  # the token that completes the stop is the last one taken
        assert whole_text(b"".join(pieces[: len(offsets)]), stops)[1] == detokenizer.stopped
        assert whole_text(b"".join(pieces[: len(offsets) - 1]), stops)[1] is None or "\ufffd" in "".join(stops)


@pytest.mark.parametrize("load", [smollm2, gemma3])
def test_no_broken_character_is_ever_sent(load: Any) -> None:
    tokenizer = load()
    texts = ["".join(data_files.emoji()[i : i + 40]) for i in range(0, len(data_files.emoji()), 40)]
    texts += ["".join("".join(row) for row in data_files.grapheme_tests()[i : i + 20]) for i in range(0, 760, 20)]
    texts += [text for text in data_files.naughty_strings() if "\ufffd" not in text]
    texts += [prompts[0] for prompts in data_files.mgsm_prompts().values()]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer)
        deltas = [detokenizer.push([token_id]).text for token_id in ids]
        assert not any("\ufffd" in delta for delta in deltas)
        assert detokenizer.finish() == ""
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("load", [smollm2, gemma3])
@pytest.mark.parametrize("stops", [["\n", "Alice:"], ["O P Q"], ["DEFGHIJ"], ["the", "and", "ing "], ["👍🏽", "日"]])
def test_real_tokens_and_stops(load: Any, stops: list[str]) -> None:
    tokenizer = load()
    text = "M N O P Q R. ABCDEFGHIJKLM and Bob: hi 👍🏽 日本 Alice: the end is nothing new.\nx"
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected, stopped = whole_text(text.encode(), stops)
    assert stopped is not None
    for size in (1, 2, 3, len(ids)):
        detokenizer = Detokenizer(tokenizer, stops)
        deltas = [detokenizer.push(ids[i : i + size]).text for i in range(0, len(ids), size)]
        assert "".join(deltas) + detokenizer.finish() == expected
        assert detokenizer.stopped == stopped


def test_a_stop_that_spans_tokens_is_never_begun() -> None:
    tokenizer = made_up_tokenizer([b"ABC", b"DE", b"FGH", b"IJ", b"K"])
    detokenizer = Detokenizer(tokenizer, ["DEFGHIJ"])
    assert [detokenizer.push([i]).text for i in range(5)] == ["ABC", "", "", "", ""]
    assert detokenizer.stopped == "DEFGHIJ"


def test_after_a_stop_nothing_more_comes() -> None:
    tokenizer = made_up_tokenizer([b"a", b"b!", b"c"])
    detokenizer = Detokenizer(tokenizer, ["b"], include_stop=True)
    step = detokenizer.push([0, 1, 2])
    assert (step.text, step.token_offsets, step.stopped) == ("ab", (0, 1), "b")
    step = detokenizer.push([2])
    assert (step.text, step.token_offsets, step.stopped) == ("", (), "b")
    assert detokenizer.finish() == ""


def test_an_incomplete_tail_is_one_replacement_character_and_can_end_the_text() -> None:
    tokenizer = made_up_tokenizer(["日".encode()[:2], b"x"])
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([0]).text == ""
    assert detokenizer.finish() == "\ufffd"
    detokenizer = Detokenizer(tokenizer, ["x\ufffd"])
    assert detokenizer.push([1, 0]).text == ""
    assert (detokenizer.finish(), detokenizer.stopped) == ("", "x\ufffd")


def test_special_tokens_are_skipped_on_request() -> None:
    tokenizer = made_up_tokenizer([b"<s>", b"a"], frozenset({0}))
    assert stream(Detokenizer(tokenizer), [[0, 1, 0]]) == "a"
    assert stream(Detokenizer(tokenizer, skip_special_tokens=False), [[0, 1, 0]]) == "<s>a<s>"
    assert Detokenizer(tokenizer).push([0, 1, 0, 1]).token_offsets == (0, 0, 1, 1)


def test_the_first_space_is_kept() -> None:
    word = gemma3().encode(" world", add_special_tokens=False)
    assert stream(Detokenizer(gemma3()), [word]) == " world"


def test_many_long_stops() -> None:
    stops = [chr(ord("a") + i) * 1023 + "!" for i in range(16)]
    text = "a" * 5000 + "b" * 1022 + "!" + "c" * 1024 + "!"
    detokenizer = Detokenizer(made_up_tokenizer([char.encode() for char in text]), stops)
    sent = "".join(detokenizer.push([i]).text for i in range(len(text)))
    assert (sent, detokenizer.stopped) == (text[:-1024], stops[2])
