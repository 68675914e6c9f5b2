"""From the fields of a request to its beam search, or the refusal of what a search cannot go together with.

Knows no HTTP, no model and no prompt.
"""

from dataclasses import replace

from scheduler.sampling_params import BeamSearch, SamplingParams
from server.errors import InvalidRequest
from server.protocol.fields import MAX_BEAM_WIDTH, GenerationFields


def with_beam_search(request: GenerationFields, params: SamplingParams) -> SamplingParams:
    """How the answers are made, complete otherwise: searched for where the request says so, else as they were.

    Raises:
        InvalidRequest: for what has no meaning without a search, or none with one.
    """
    if not request.use_beam_search:
        _refuse_without_search(request)
        return params
    width = _width(request)
    _refuse_drawing(params)
    if request.stream:
        raise InvalidRequest(
            "The answers of a beam search are known at its end: they are not streamed; leave out stream.", "stream"
        )
    if params.structured_output is not None:
        param = params.structured_output.param
        raise InvalidRequest(f"use_beam_search and {param} exclude each other; leave one of them out.", param)
    search = BeamSearch(
        width=width,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=bool(request.early_stopping),
    )
    return replace(params, n=request.n or 1, temperature=0.0, beam_search=search)


def _refuse_without_search(request: GenerationFields) -> None:
    asked = {
        "beam_width": request.beam_width is not None,
        "length_penalty": request.length_penalty not in (None, 1.0),
        "early_stopping": bool(request.early_stopping),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidRequest(f"{name} belongs to a beam search: it needs use_beam_search to be true.", name)


def _width(request: GenerationFields) -> int:
    """How many beams live at once, by the first of the fields that say so."""
    name, width = request.beam_width_field
    n = request.n or 1
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequest(f"{name} is {width}; a beam search keeps at most {MAX_BEAM_WIDTH} beams.", name)
    if width < n:
        raise InvalidRequest(f"{name} is {width}; it must be at least n, which is {n}.", name)
    return width


def _refuse_drawing(params: SamplingParams) -> None:
    """A search takes the likeliest tokens; what bounds the choice of a drawn one would be ignored."""
    asked = {
        "temperature": params.temperature not in (0.0, 1.0),
        "top_p": params.top_p != 1.0,
        "top_k": params.top_k != 0,
        "min_p": params.min_p != 0.0,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidRequest(f"A beam search draws no tokens, and {name} bounds the drawing; leave it out.", name)
