"""What the page "Live" shows beside the pool: the engine's counters, latencies as histograms, and the requests.

Counters are sent as they stand; the page makes rates and percentiles of their differences. Holds no prompt and no
answer.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kernels import __version__
from server.edge import Edge
from server.protocol.responses import to_json
from server.request_history import RequestTrace, end_record

MAX_SHOWN_REQUESTS = 200
_MAX_SHOWN_ENDED = 30
_SECONDS = 0.5  # between two overviews: a page asks once a second


class OpenRequest(msgspec.Struct, frozen=True):
    """A request whose answer is not complete."""

    id: str
    request_id: str
    key: str | None
    endpoint: str
    created: float  # seconds since the epoch
    num_prompts: int


class Latency(msgspec.Struct, frozen=True):
    """A histogram: how many values were up to each bound and above the one before; the last bound is infinite."""

    bounds: list[float]  # seconds, without the infinite one
    counts: list[int]


class Overview(msgspec.Struct, frozen=True):
    """The server at one moment."""

    time: float  # seconds since the epoch
    uptime: float  # seconds
    version: str
    model: str
    ready: bool
    draining: bool
    info: dict[str, Any] | None  # of EngineInfo by name; None while the model loads
    stats: dict[str, Any] | None  # of EngineStats by name; None while there are none
    latencies: dict[str, Latency]  # by the names of their series
    num_open: int
    open: list[OpenRequest]  # the oldest ones
    ended: list[dict[str, Any]]  # the newest first


def overview(edge: Edge) -> Overview:
    """The server as of now."""
    engine, history = edge.engine, edge.history
    info, stats = engine.info, engine.stats
    return Overview(
        time=time.time(),
        uptime=time.time() - edge.created,
        version=__version__,
        model=edge.settings.served_names[0],
        ready=engine.ready,
        draining=engine.draining,
        info=None if info is None else msgspec.structs.asdict(info),
        stats=None if stats is None else msgspec.structs.asdict(stats),
        latencies={
            name: Latency(list(histogram.bounds[:-1]), list(histogram.counts))
            for name, histogram in edge.metrics.latencies().items()
        },
        num_open=history.num_unanswered,
        open=[_open_request(trace) for trace in history.unanswered(MAX_SHOWN_REQUESTS)],
        ended=[{**end_record(trace), "created": trace.created} for trace in history.last_ended(_MAX_SHOWN_ENDED)],
    )


class OverviewSnapshots:
    """The newest overview, made once for all who watch."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """None is made before somebody asks."""
        self._clock = clock
        self._json = b""
        self._next = -math.inf  # when it is old enough to be made anew

    def newest(self, edge: Edge) -> bytes:
        """As JSON, at most half a second old."""
        if self._clock() >= self._next:
            self._json = to_json(overview(edge))
            self._next = self._clock() + _SECONDS
        return self._json


def _open_request(trace: RequestTrace) -> OpenRequest:
    return OpenRequest(
        trace.answer_id, trace.request_id, trace.key_name, trace.endpoint, trace.created, trace.num_prompts
    )
