"""The sandbox that chat templates run in: what they may use, and bounds on their time, their output and their values.

A template comes with the model, so its author is half trusted; what is written into it comes from anybody. Knows no
chats and no messages.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 16_000_000  # of a value or of the output: beyond any context window
MAX_RANGE_ITEMS = 1_000_000  # that all range() calls of one rendering may yield together
MAX_CPU_SECONDS = 5.0  # of one rendering; the largest conversations take a few tenths
MAX_POWER_BITS = 4096
# What the bounds call; no template may use these names.
_TICK = "octavo_tick"  # in every macro, and in every pass of a loop that is recursive
_EACH = "octavo_each"  # around what other loops run over
_CONCAT = "octavo_concat"  # for `~`
_OWN_NAMES = frozenset({_TICK, _EACH, _CONCAT})
_CLOCK_SECONDS = 0.01  # between two looks at a thread's CPU time, which costs a system call
_PIECES_PER_TICK = 1000  # of JSON
_WIDE_FORMAT = re.compile(r"[%:][^}]*?(\d{6,}|\*)")  # a width of a million characters, or one that is computed


def compile_template(source: str) -> jinja2.Template:
    """Compile a template, with bounds. Raises jinja2.TemplateSyntaxError, and what the compiler raises."""
    tree = SANDBOX.parse(source)
    named: list[nodes.Name | nodes.Macro] = [*tree.find_all(nodes.Name), *tree.find_all(nodes.Macro)]
    for node in named:
        if node.name in _OWN_NAMES:
            raise jinja2.TemplateSyntaxError(f"the name {node.name} is taken", node.lineno)
    bounded = _Bounding().visit(tree)
    return SANDBOX.template_class.from_code(SANDBOX, SANDBOX.compile(bounded), SANDBOX.make_globals(None), None)


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The output. Raises what an expression of a template can raise, SecurityError for one that is out of bounds."""
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate({**variables, **_Budget().functions()}):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_CHARS:
            raise SecurityError(f"it writes more than {MAX_CHARS} characters")
    return "".join(pieces)


def reserved_names() -> frozenset[str]:
    """Variables that have a meaning in every template."""
    return frozenset({*SANDBOX.globals, "range", *_OWN_NAMES})


class _Bounding(NodeTransformer):
    """Puts a call into every place that a template can pass more than once, and bounds what it joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - the name that Jinja looks for
        if node.recursive:  # it runs over what it calls itself with, too
            return self._with_tick(node)
        self.generic_visit(node)
        node.iter = _call(_EACH, [node.iter], node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call(_CONCAT, node.nodes, node.lineno)

    def _with_tick(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(_TICK, [], node.lineno), lineno=node.lineno))
        return node


def _call(name: str, arguments: Sequence[nodes.Node], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=lineno), list(arguments), [], None, None, lineno=lineno)


class _Budget:
    """What one rendering may use."""

    def __init__(self) -> None:
        self._num_range_items = MAX_RANGE_ITEMS
        self._end = time.thread_time() + MAX_CPU_SECONDS  # a rendering stays in its thread
        self._next_look = 0.0

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that spend it."""
        return {"range": self._range, _TICK: self._tick, _EACH: self._each, _CONCAT: _concat}

    def _range(self, *arguments: int) -> range:
        items = range(*arguments)
        if len(items) > self._num_range_items:
            raise SecurityError(f"its loops run over more than {MAX_RANGE_ITEMS} numbers")
        self._num_range_items -= len(items)
        return items

    def _tick(self) -> None:
        now = time.perf_counter()
        if now > self._next_look:
            self._next_look = now + _CLOCK_SECONDS
            if time.thread_time() > self._end:
                raise SecurityError(f"it runs for more than {MAX_CPU_SECONDS:g} seconds")

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._tick()
            yield item


def _concat(*values: object) -> str:
    texts = [str(value) for value in values]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _check_length(length: int) -> None:
    if length > MAX_CHARS:
        raise SecurityError(f"it makes a value of more than {MAX_CHARS} items")


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training masks; here its content is simply rendered."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - the type that Jinja declares

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """No access to Python's internals, nothing changed, and nothing that makes something huge out of little."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        if operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(count, int):
                    _check_length(len(sized) * count)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_POWER_BITS:
                raise SecurityError("it computes a number that is too large")
        elif operator == "%":
            _check_format(left)
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        """Call something, unless a method of a string would make a huge one."""
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # Jinja wraps str.format
        if isinstance(owner, str):
            _check_text_call(function.__name__, owner, arguments)
        return super().call(context, function, *arguments, **named)


def _check_format(form: object) -> None:
    if isinstance(form, str) and _WIDE_FORMAT.search(form):
        raise SecurityError("it formats a value with a huge width")


def _check_text_call(method: str, owner: str, arguments: tuple[Any, ...]) -> None:
    for argument in arguments:
        if isinstance(argument, int):
            _check_length(len(owner) * argument if method == "expandtabs" else argument)
    if method == "format":
        _check_format(owner)
    elif method == "replace" and len(arguments) >= 2 and all(isinstance(a, str) for a in arguments[:2]):
        _check_length(len(owner) + owner.count(arguments[0]) * len(arguments[1]))
    elif method == "join" and arguments and isinstance(arguments[0], list | tuple):
        _check_length(sum(len(owner) + len(item) for item in arguments[0] if isinstance(item, str)))


def _bounded_filter(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that makes text, with a check before it."""

    @wraps(original)  # takes over how Jinja is to call it
    def bounded(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        values = [value for value in arguments if not isinstance(value, jinja2.Environment | nodes.EvalContext)]
        for value in (*values, *named.values()):
            if isinstance(value, int):
                _check_length(value)
        if name == "format":
            _check_format(values[0])
        elif name == "replace":
            _check_text_call("replace", str(values[0]), tuple(map(str, values[1:3])))
        elif name == "join" and isinstance(values[0], list | tuple):
            _check_text_call("join", str(values[1]) if len(values) > 1 else "", (values[0],))
        return original(*arguments, **named)

    return bounded


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: Jinja's own filter escapes <, >, & and ' for HTML."""
    _check_length((indent if isinstance(indent, int) else 0) * 1000)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces, num_chars = [], 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        num_chars += len(piece)
        if len(pieces) % _PIECES_PER_TICK == 0:
            _check_length(num_chars)
            context[_TICK]()
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    _check_length(len(form) * 1000)
    return datetime.now().astimezone().strftime(form)


def _build_environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    for name in ("batch", "center", "format", "indent", "join", "replace", "slice", "truncate", "wordwrap"):
        environment.filters[name] = _bounded_filter(name, environment.filters[name])
    environment.filters["tojson"] = _tojson
    functions: Iterable[Callable[..., Any]] = (_raise_exception, _strftime_now)
    environment.globals |= {function.__name__.removeprefix("_"): function for function in functions}
    return environment


SANDBOX = _build_environment()  # never changed: each rendering brings its own variables
