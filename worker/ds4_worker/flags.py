"""Command-line flags as tables: parsing them, checking their values, and the text of --help.

argparse would do, but it takes as long to import as the owner takes to hand over a model, and a
worker is started fifty times a day. No abbreviations, no positional arguments; every value is text
until a checker below turns it into a number. All errors are `UsageError`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from ds4_common.errors import UsageError

_HELP_COLUMN = 32
_HELP_WIDTH = 96


class Flag(msgspec.Struct, frozen=True):
    """`names`: spellings, the one that error messages use first. `value`: what --help calls the
    value; "" for a switch; in brackets when there may be any number of them."""

    names: tuple[str, ...]
    value: str
    help: str


class Group(msgspec.Struct, frozen=True):
    title: str
    flags: tuple[Flag, ...]


class Options:
    """Parsed flags by their first name. Absent ones are None, or empty."""

    def __init__(self, values: Mapping[str, list[str]]) -> None:
        self._values = values

    def text(self, name: str) -> str | None:
        values = self._values.get(name)
        return values[-1] if values else None

    def all(self, name: str) -> tuple[str, ...]:
        return tuple(self._values.get(name, ()))

    def given(self, name: str) -> bool:
        return name in self._values

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        text = self.text(name)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            raise UsageError(f"{name}: got {text!r}, expected an integer") from None
        if not low <= value <= high:
            raise UsageError(f"{name}: got {value}, expected {low} to {high}")
        return value

    def real(self, name: str, low: float, high: float) -> float | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"{name}: got {text!r}, expected a number") from None
        if not low <= value <= high:  # also refuses nan
            raise UsageError(f"{name}: got {text}, expected {low:g} to {high:g}")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`; the first when absent."""
        text = self.text(name)
        if text is None:
            return choices[0]
        if text not in choices:
            raise UsageError(f"{name}: got {text!r}, expected {' or '.join(choices)}")
        return text


def parse(argv: Sequence[str], groups: Sequence[Group]) -> Options:
    """`--flag value`, `--flag=value` and switches, in any order; the last one counts."""
    known = {name: flag for group in groups for flag in group.flags for name in flag.names}
    values: dict[str, list[str]] = {}
    many: list[str] | None = None  # of a flag that takes the words after it
    words = iter(argv)
    for word in words:
        if many is not None and not word.startswith("-"):
            many.append(word)
            continue
        many = None
        name, equals, value = word.partition("=")
        flag = known.get(name)
        if flag is None:
            what = "flag" if word.startswith("-") else "argument"
            raise UsageError(f"unknown {what} {word!r}; --help lists what there is")
        if flag.value.startswith("["):
            many = values.setdefault(flag.names[0], [])
            if equals:
                many.append(value)
            continue
        if not flag.value:
            if equals:
                raise UsageError(f"{name} takes no value, got {value!r}")
        elif not equals:
            following = next(words, None)
            if following is None:
                raise UsageError(f"{name} needs a value: {flag.value}")
            value = following
        values.setdefault(flag.names[0], []).append(value)
    return Options(values)


def without(argv: Sequence[str], flag: str) -> list[str]:
    """The words of a command line that parses, less a flag that may have any number of values."""
    kept: list[str] = []
    dropping = False
    for word in argv:
        dropping = word.partition("=")[0] == flag or (dropping and not word.startswith("-"))
        if not dropping:
            kept.append(word)
    return kept


def help_text(usage: str, groups: Sequence[Group]) -> str:
    lines = [f"usage: {usage}"]
    for group in groups:
        lines += ["", f"{group.title}:"]
        for flag in group.flags:
            lines += _flag_help(flag)
    return "\n".join(lines)


def _flag_help(flag: Flag) -> list[str]:
    head = f"  {', '.join(flag.names)} {flag.value}".rstrip()
    lines, words = [], flag.help.split()
    indent = " " * _HELP_COLUMN
    line = head.ljust(_HELP_COLUMN) if len(head) < _HELP_COLUMN else f"{head}\n{indent}"
    for word in words:
        if len(line.rpartition("\n")[2]) + len(word) >= _HELP_WIDTH:
            lines.append(line.rstrip())
            line = indent
        line += word + " "
    return [*lines, line.rstrip()]


def read_text(path: str) -> str:
    """A text file that a person named. Raises UsageError."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path!r}: {error}") from error
