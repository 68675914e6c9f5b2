"""What the routes share: the engine, the tokenizer, the settings, the metrics. One per application."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from server.config import Settings
from server.engine_client import EngineClient
from server.engine_errors import EngineUnavailable
from server.fingerprint import system_fingerprint
from server.log_lines import current_request
from server.metrics import ServerMetrics
from server.preparer import Preparer
from server.request_history import RequestHistory, RequestTrace
from server.served_model import ServedModel
from server.service_terms import Submitter
from server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Edge:
    """Everything that a route may use."""

    engine: EngineClient
    tokenizer: Tokenizer
    settings: Settings
    metrics: ServerMetrics
    longest_token: int  # bytes
    preparer: Preparer
    history: RequestHistory
    created: int  # when the server started, in seconds since the epoch

    def served_model(self) -> ServedModel:
        """What requests are checked against.

        Raises:
            EngineUnavailable: while the model is loading, or the server shuts down.
        """
        info = self.engine.info
        if self.engine.draining:
            raise EngineUnavailable("The server is shutting down.")
        if info is None:
            raise EngineUnavailable("The model is still loading.")
        return ServedModel(
            names=self.settings.served_names,
            tokenizer=self.tokenizer,
            longest_token=self.longest_token,
            vocab_size=min(info.vocab_size, self.tokenizer.vocab_size),
            max_model_len=info.max_model_len,
            hidden_size=info.hidden_size,
            tool_call_parser=None if self.settings.tool_call_parser == "auto" else self.settings.tool_call_parser,
        )

    def submitter(self, request: Request) -> Submitter:
        """Who asks: the holder of the key that came with the request."""
        settings = self.settings
        return Submitter(
            key_name_of(request),
            settings.request_timeout,
            settings.queue_timeout,
            settings.max_num_queued_reqs,
            settings.max_num_queued_tokens,
        )

    def trace(self, request: Request, answer_id: str, model: str, num_prompts: int) -> RequestTrace:
        """Remember from now on what becomes of a request that goes to the engine; ended when its answer is sent."""
        state = request.state
        trace = RequestTrace(
            answer_id, state.request_id, state.key_name, model, request.scope["route"].path, num_prompts
        )
        trace.context, trace.span = current_request.get(), state.span
        state.trace = trace
        self.metrics.usage.of(state.key_name).num_requests += 1
        return self.history.open(trace)

    def fingerprint(self) -> str:
        """Names what answers; empty while nothing does."""
        info = self.engine.info
        return "" if info is None else system_fingerprint(self.settings, info)


def key_name_of(request: Request) -> str:
    """The name of the key that came with it; "" where there are no keys."""
    key_name: str | None = request.state.key_name
    return key_name or ""


async def _edge_of(request: Request) -> Edge:  # a plain function would be called in a thread
    edge: Edge = request.app.state.edge
    return edge


CurrentEdge = Annotated[Edge, Depends(_edge_of)]
