"""PromQL as the board asks it: of which series, over what time, and never with an empty answer for want of traffic.

`rate` of a counter that stands still is 0, and 0 of 0 is NaN, which Grafana draws as a gap: so no comparison such as
`> 0`, which would leave nothing, guards a divisor. Knows the board's variables, and no series by name.
"""

SELECTOR = 'model_name=~"$model_name", instance=~"$instance", engine=~"$engine"'
# The HTTP series and those of the process belong to a server, not to an engine with a model.
SERVER_SELECTOR = 'instance=~"$instance"'

# What deploy/prometheus/rules.yml records is of all servers of a job together, and of HTTP also without a model.
RECORDED_SELECTOR = 'model_name=~"$model_name|"'

_OVER = "[$__rate_interval]"


def selected(series: str, *matchers: str, selector: str = SELECTOR) -> str:
    """A series of what the viewer chose, narrowed by further matchers such as `reason="capacity"`."""
    return f"{series}{{{', '.join((selector, *matchers))}}}"


def total(series: str, *matchers: str, by: str = "", selector: str = SELECTOR) -> str:
    """A gauge's sum, for each value of the label `by` where one is given."""
    return f"{_sum(by)}({selected(series, *matchers, selector=selector)})"


def mean(series: str) -> str:
    """A gauge's mean over what was chosen: for parts of a whole, which do not add up."""
    return f"avg({selected(series)})"


def rate(counter: str, *matchers: str, by: str = "", selector: str = SELECTOR) -> str:
    """How much a counter grows in a second."""
    return f"{_sum(by)}(rate({selected(counter, *matchers, selector=selector)}{_OVER}))"


def increase(counter: str, *matchers: str, by: str = "", selector: str = SELECTOR) -> str:
    """How much a counter grew within the window of a point."""
    return f"{_sum(by)}(increase({selected(counter, *matchers, selector=selector)}{_OVER}))"


def quotient(dividend: str, divisor: str) -> str:
    """One rate by another, or by a number; NaN where both are 0."""
    return f"{dividend} / {divisor}"


def quantile(share: float, histogram: str, by: str = "", selector: str = SELECTOR) -> str:
    """A percentile of what a histogram saw within the window."""
    labels = ", ".join(filter(None, ("le", by)))
    buckets = selected(f"{histogram}_bucket", selector=selector)
    return f"histogram_quantile({share}, sum by ({labels}) (rate({buckets}{_OVER})))"


def mean_observed(histogram: str) -> str:
    """The mean of what a histogram saw within the window."""
    return quotient(rate(f"{histogram}_sum"), rate(f"{histogram}_count"))


def share_within(histogram: str, bound: str) -> str:
    """Which part of what a histogram saw within the window was at most `bound`, one of its edges."""
    return quotient(rate(f"{histogram}_bucket", f'le="{bound}"'), rate(f"{histogram}_count"))


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"
