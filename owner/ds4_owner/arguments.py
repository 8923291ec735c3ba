"""Command lines of `ds4-weight-server` and its subcommands."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ds4_common.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageError, so that there is one place that prints and exits."""

    def error(self, message: str) -> NoReturn:
        _, _, subcommand = self.prog.partition(" ")
        raise UsageError(f"{subcommand}: {message}" if subcommand else message)
