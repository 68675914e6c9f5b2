"""Prompts for models that can fill a gap between two texts: those whose vocabulary has the tokens to mark one.

The order is prefix, suffix, middle (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the
Middle"), in which published models were trained. Knows no request and no engine.
"""

from server.errors import InvalidRequest
from server.served_model import ServedModel

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
)


def prompt_with_gap(before: str | tuple[int, ...], suffix: str, model: ServedModel) -> str | tuple[int, ...]:
    """The prompt for what stands between `before` and the text `suffix`, in the form that `before` has.

    Raises:
        InvalidRequest: naming `suffix`, for a model that was not trained to fill a gap.
    """
    prefix_mark, suffix_mark, middle_mark = _marks_of(model)
    if isinstance(before, str):
        return f"{prefix_mark}{before}{suffix_mark}{suffix}{middle_mark}"
    model.check_window(len(suffix) // model.longest_token, "suffix", "at least ")
    after = model.tokenise(f"{suffix_mark}{suffix}{middle_mark}", "suffix", add_special_tokens=False)
    return (*model.tokenise(prefix_mark, "suffix", add_special_tokens=False), *before, *after)


def _marks_of(model: ServedModel) -> tuple[str, str, str]:
    for marks in _MARKS:
        tokens = [model.tokenise(mark, "suffix", add_special_tokens=False) for mark in marks]
        if all(len(token) == 1 and token[0] < model.vocab_size for token in tokens):
            return marks
    raise InvalidRequest(
        f"The model {model.names[0]} cannot fill a gap: its vocabulary has no tokens to mark one. Leave out suffix.",
        "suffix",
    )
