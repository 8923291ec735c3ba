"""The Jinja environment that chat templates run in. Imports jinja2, so it is imported late.

Hugging Face's environment (trim_blocks, lstrip_blocks, loop controls, `tojson`, `raise_exception`,
`strftime_now`, the `generation` tag) and `from_json` inside jinja2's immutable sandbox. A call
into C cannot be interrupted by a deadline, so its work is bounded by what it works on: no value
that a template builds - by an operator, a literal, a call, a filter, a block - is larger than
`max_chars`, written out; and all of them together are bounded for one rendering. What could be
large only in between (a width, a separator, a power) is checked before.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment
from jinja2.visitor import NodeTransformer

_DROPPED_FILTERS = ("center", "format", "pprint", "urlize", "wordwrap", "xmlattr")
_DROPPED_METHODS = ("encode", "translate")
_PASSING_FILTERS = ("attr", "d", "default", "first", "last", "max", "min", "random")
_PADDING_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)")
_WIDE_FIELD = re.compile(r"\{[^{}]*:[^{}]*(\d{4,}|\{)")
_MAX_VISITED = 1 << 18  # items of a value and of what it holds; counting them takes 0.1 s
_MAX_BITS = 4096  # of integers: their division takes quadratic time
_MAX_SMALL = 1000  # widths, precisions, indents, separators, date formats
_MAX_VALUES = 64  # times max_chars: all values of one rendering
_BOUNDED = "bounded"
# Concrete types: asking an abstract one takes twenty times as long.
_VIEWS: tuple[type[Iterable[Any]], ...] = (type({}.keys()), type({}.values()), type({}.items()))


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it
    only passes it on."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounding(NodeTransformer):
    """Makes interceptable what the sandbox does not see: `a ~ b` becomes an addition of strings, a
    list, tuple or dict goes through a filter."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        strings = [_filtered(child, "string") for child in node.nodes]
        total: nodes.Expr = strings[0]
        for string in strings[1:]:
            total = nodes.Add(total, string, lineno=node.lineno)
        return total

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _BOUNDED) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _BOUNDED) if node.items and node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _BOUNDED) if node.items else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with bounds. `max_chars` limits any single value a template builds."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            finalize=self._printed,
        )
        self.max_chars = max_chars
        self._spent = threading.local()

    def begin(self) -> None:
        """Starts a rendering in this thread."""
        self._spent.chars = 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Bounding().visit(tree)
        return tree

    # --- what a value may be

    def weigh(self, value: Any) -> int:
        """About how many characters `value` has when written out. Raises when that is too much.

        Containers that hold one another count as often as they would be written, which is also how
        often comparing or hashing visits them.
        """
        size, visited = 0, 0
        left: list[Any] = [value]
        while left:
            item = left.pop()
            visited += 1
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict):
                left += item.keys()
                left += item.values()
            elif isinstance(item, list | tuple | set) or isinstance(item, _VIEWS):
                left += item
            elif isinstance(item, Namespace):
                raise SecurityError("a namespace is no value")
            elif isinstance(item, int) and item.bit_length() > _MAX_BITS:
                raise SecurityError(f"an integer is too large: more than {_MAX_BITS} bits")
            if size > self.max_chars or visited > _MAX_VISITED:
                raise SecurityError(
                    f"a value is too large: more than {self.max_chars} characters "
                    f"or {_MAX_VISITED} items"
                )
        return size + 2 * visited

    def built(self, value: Any) -> Any:
        """Passes on a new value, which counts for this rendering."""
        self.weigh(value)
        self.spend(len(value) if isinstance(value, str | list | tuple | dict) else 1)
        return value

    def check(self, size: int) -> None:
        if size > self.max_chars:
            raise SecurityError(f"a value is too large: more than {self.max_chars} characters")

    def spend(self, size: int) -> None:
        """Counts characters or items about to be built."""
        self.check(size)
        self._spent.chars = getattr(self._spent, "chars", 0) + size
        if self._spent.chars > _MAX_VALUES * self.max_chars:
            raise SecurityError("all the values it builds are too large together")

    # --- where values are made

    def concat(self, pieces: Iterable[str]) -> str:
        """What blocks and macros join their output with."""
        parts = list(pieces)
        self.spend(sum(map(len, parts)))
        return "".join(parts)

    def _printed(self, value: Any) -> Any:
        if isinstance(value, Namespace):
            raise SecurityError("a namespace cannot be printed")
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            self.spend(len(left) + len(right))  # most of what templates do: keep it short
            return left + right
        operands = self.weigh(left) + self.weigh(right)
        if operator in ("+", "*"):
            self.spend(self._size_of(operator, left, right, operands))
        elif operator == "%" and isinstance(left, str):
            if _WIDE.search(left):
                raise SecurityError("the width of a format is too large")
            self.spend(len(left) + left.count("%") * self.weigh(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if abs(right) * left.bit_length() > _MAX_BITS:
                raise SecurityError("the result of '**' is too large")
        result = super().call_binop(context, operator, left, right)
        self.weigh(result)
        return result

    def _size_of(self, operator: str, left: Any, right: Any, operands: int) -> int:
        if operator == "+":
            size = operands
        elif isinstance(left, int) == isinstance(right, int):
            return 0  # numbers
        else:
            size = operands * max(left if isinstance(left, int) else right, 0)
        if isinstance(left, list | tuple) or isinstance(right, list | tuple):
            items = _length(left) + _length(right)
            count = max((x for x in (left, right) if isinstance(x, int)), default=1)
            if items * max(count, 1) > MAX_RANGE:
                raise SecurityError(f"a list is too large: more than {MAX_RANGE} items")
        return size

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes) and attr in _DROPPED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            if _WIDE_FIELD.search(text):
                raise SecurityError("the width of a format is too large")
            self.spend(len(text) + text.count("{") * self.weigh((args, kwargs)))
            return wrapped(*args, **kwargs)

        return bounded

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            args = self._check_method(owner, obj.__name__, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(owner, str):
            return self.built(result)
        if not isinstance(result, Namespace):
            self.weigh(result)
        return result

    def _check_method(
        self, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Bounds the result of a text method; returns the arguments to call it with."""
        if name in _PADDING_METHODS:
            widths = [a for a in (*args, *kwargs.values()) if isinstance(a, int)]
            self.spend((len(owner) if name == "expandtabs" else 1) * max(widths, default=0))
        elif name == "replace":
            self.spend(_replaced_length(owner, args))
        elif name == "join" and args:
            parts = list(args[0])
            self.spend(self.weigh(parts) + len(owner) * len(parts))
            return (parts,)
        return args


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _replaced_length(text: str, args: tuple[Any, ...]) -> int:
    """Characters of text.replace(*args)."""
    if len(args) < 2 or not (isinstance(args[0], str) and isinstance(args[1], str)):
        return 0
    old, new = args[0], args[1]
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


# --- filters


def _bounded_filter(
    environment: ChatEnvironment, name: str, filter_: Callable[..., Any]
) -> Callable[..., Any]:
    """A filter whose result is bounded, and counts unless it is one that was there before."""

    @functools.wraps(filter_)  # also the mark that jinja2 passes an environment or a context
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = filter_(*args, **kwargs)
        environment.weigh(result)
        if name not in _PASSING_FILTERS and not any(result is argument for argument in args):
            environment.spend(_length(result))
        return result

    return checked


def _small(name: str, value: object) -> None:
    size = len(value) if isinstance(value, str) else value
    if isinstance(size, int) and abs(size) > _MAX_SMALL:
        raise SecurityError(f"{name}: {size} is too large, at most {_MAX_SMALL}")


@pass_environment
def _join(
    environment: ChatEnvironment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    parts = []
    size = 0
    for item in value:
        environment.weigh(item)
        parts.append(str(item))
        size += len(parts[-1]) + len(d)
        environment.check(size)
    return str(d).join(parts)


@pass_environment
def _replace(
    environment: ChatEnvironment, s: Any, old: str, new: str, count: int | None = None
) -> str:
    environment.weigh(s)
    text = str(s)
    environment.spend(_replaced_length(text, (str(old), str(new))))
    return text.replace(str(old), str(new), -1 if count is None else count)


@pass_environment
def _sum(
    environment: ChatEnvironment,
    iterable: Iterable[Any],
    attribute: Any = None,
    start: float = 0,
) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("sum: expected numbers")
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    return sum(iterable, start)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    for part in (indent, *(separators or ())):
        _small("tojson", part)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@pass_environment
def _from_json(environment: ChatEnvironment, text: object) -> Any:
    """What a text of JSON says: some templates take arguments of calls as text."""
    if not isinstance(text, str):
        raise TemplateError(f"from_json: got {type(text).__name__}, expected a text")
    environment.check(len(text))
    try:
        return json.loads(text)
    except ValueError as error:
        raise TemplateError(f"from_json: {error}") from error


def _first_small(filter_: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A filter whose arguments are counts, widths or precisions."""

    @functools.wraps(filter_)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            _small(name, argument)
        return filter_(value, *args, **kwargs)

    return checked


def _pass_on(value: Any) -> Any:
    return value


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    _small("strftime_now", form)
    return datetime.datetime.now().strftime(form)


def make_environment(max_chars: int) -> ChatEnvironment:
    environment = ChatEnvironment(max_chars)
    filters: dict[str, Callable[..., Any]] = environment.filters
    for name in _DROPPED_FILTERS:
        del filters[name]
    filters |= {
        "from_json": _from_json, "join": _join, "replace": _replace, "sum": _sum, "tojson": _tojson,
    }  # fmt: skip
    for name in ("batch", "indent", "round", "slice"):
        filters[name] = _first_small(filters[name], name)
    filters[_BOUNDED] = _pass_on
    environment.filters = {
        name: _bounded_filter(environment, name, filter_) for name, filter_ in filters.items()
    }
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]
    return environment
