"""What the text of an answer must be, found by looking at all of it at once."""

from collections.abc import Sequence


def whole_text(
    data: bytes, stops: Sequence[str], include_stop: bool = False, num_spared_chars: int = 0
) -> tuple[str, str | None]:
    """The oracle: the stop that is complete first ends the text, the longest of those complete at once."""
    text = data.decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete and end > num_spared_chars:
            longest = max(complete, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


def decoded_so_far(data: bytes) -> str:
    """Without the tail that could still become one character, found by trying every continuation that UTF-8 allows."""
    for length in range(min(3, len(data)), 0, -1):
        tail = data[len(data) - length :]
        for more in (b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\x80\x80\x80", b"\xbf\xbf\xbf"):
            try:
                if len((tail + more).decode()) == 1:
                    return data[: len(data) - length].decode("utf-8", "replace")
            except UnicodeDecodeError:
                continue
    return data.decode("utf-8", "replace")
