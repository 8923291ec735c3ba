"""The `ds4-profile` command: a tmux session with an owner that stays and a worker to profile.

Owns argv and exit codes (0 done, 1 failed, 2 usage). Everything it starts is a plain command, which
`--print` shows instead of running, so nothing here is needed to profile by hand.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from ds4_common import client
from ds4_common.errors import Ds4Error, OwnerUnavailable, UsageError
from ds4_common.paths import MANIFEST_VARIABLE
from ds4_common.version import version_line
from ds4_worker import address, private_owner
from ds4_worker.address import Address
from ds4_worker.profile import commands, load, target, tools
from ds4_worker.profile.commands import Settings
from ds4_worker.profile.session import ProfileSession
from ds4_worker.profile.target import Target

USAGE = """\
ds4-profile open [-m FILE] [--manifest FILE] [--tool TOOL] [options] [-- WORKER-FLAGS]
       ds4-profile restart [--tool TOOL] [options] [-- WORKER-FLAGS]
       ds4-profile load [--host ADDRESS] [--port N] [load options]
       ds4-profile load --name NAME [--manifest FILE | -m FILE] [load options]
       ds4-profile close [--owner]"""
TOOL_NAMES = (tools.NO_TOOL, *tools.TOOLS)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ds4-profile", usage=USAGE, allow_abbrev=False,
                     description="Profiles workers beside an owner that stays.")  # fmt: skip
    parser.add_argument("--version", action="version", version=version_line(parser.prog))
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="open|restart|load|close")
    opened = verbs.add_parser("open", help="open or join the session", allow_abbrev=False)
    opened.add_argument("--out", default="ds4-profiles", metavar="DIR",
                        help="where reports go (default: ds4-profiles)")  # fmt: skip
    opened.add_argument("--detach", action="store_true", help="do not attach this terminal")
    opened.add_argument("--print", action="store_true", help="print the commands, run nothing")
    again = verbs.add_parser("restart", help="another worker; the owner stays", allow_abbrev=False)
    closed = verbs.add_parser("close", help="end the worker; the owner stays", allow_abbrev=False)
    closed.add_argument("--owner", action="store_true", help="end the owner of this session too")
    sent = verbs.add_parser("load", help="send requests to a worker", allow_abbrev=False)
    _add_owner(opened, "what an owner window loads, unless an owner of it runs already")
    _add_owner(sent, "with --name: whose private owner knows the worker")
    for verb in (opened, sent):
        verb.add_argument("--host", metavar="ADDRESS", help="of the worker, as ds4-server has it:"
                          " also [IPV6]:PORT or unix:PATH (default: 127.0.0.1)")  # fmt: skip
        verb.add_argument("--port", type=int, metavar="N", help="of the worker (default: 8000);"
                          " 0, with open --name: any")  # fmt: skip
        verb.add_argument("--name", default="", metavar="NAME", help="of the worker; load finds"
                          " its address by it")  # fmt: skip
    for verb in (opened, again, closed):
        verb.add_argument("--session", default="ds4", metavar="NAME", help="default: ds4")
        verb.add_argument("--socket", metavar="NAME", help="of the tmux server (tmux -L)")
    for verb in (opened, again):
        verb.add_argument("--tool", choices=TOOL_NAMES, help="what the worker runs under")
        verb.add_argument("worker_flags", nargs="*", metavar="-- WORKER-FLAGS",
                          help="flags for ds4-server")  # fmt: skip
    for verb in (opened, again, sent):
        group = verb.add_argument_group("load")
        for name, text in (
            ("requests", "how many; 0: none (default: 8)"),
            ("prompt-tokens", "about how long each prompt is (default: 512)"),
            ("max-tokens", "how many tokens each answer has (default: 64)"),
            ("concurrency", "requests at once (default: 1)"),
        ):
            group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    return parser


def _add_owner(verb: argparse.ArgumentParser, model: str) -> None:
    verb.add_argument("-m", "--model", metavar="FILE", help=model)
    verb.add_argument("--manifest", metavar="FILE", help="the owner's manifest (default:"
                      f" ${MANIFEST_VARIABLE}, else that of -m's private owner)")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ds4-profile`; returns the exit code."""
    try:
        return _dispatch(build_parser().parse_args(argv))
    except UsageError as error:
        print(f"ds4-profile: {error}\nSee ds4-profile --help.", file=sys.stderr)
        return UsageError.exit_code
    except Ds4Error as error:
        print(f"ds4-profile: {error}", file=sys.stderr)
        return error.exit_code


def _dispatch(options: argparse.Namespace) -> int:
    match options.verb:
        case "open":
            return _open(options)
        case "restart":
            return _restart(options)
        case "close":
            session = ProfileSession.find(options.session, options.socket)
            session.settings()  # or there is nothing to close
            session.close(owner=options.owner)
            return 0
    sent = _merged(Settings(manifest=""), options)
    if not sent.requests:
        raise UsageError("--requests 0: nothing to send")
    done = load.run(
        _target(options), requests=sent.requests, prompt_tokens=sent.prompt_tokens,
        max_tokens=sent.max_tokens, concurrency=sent.concurrency,
    )  # fmt: skip
    load.print_summary(done)
    return 0


def _open(options: argparse.Namespace) -> int:
    manifest, pid = _owner(options.model, options.manifest)
    settings = _merged(
        Settings(
            manifest=manifest,
            model=None if options.model is None else os.path.realpath(options.model),
            address=_address(options),
            name=options.name,
            folder=os.path.abspath(options.out),
        ),
        options,
    )
    if options.print:
        _print_commands(settings, pid)
        return 0
    tools.require(settings.tool)
    session = ProfileSession.find(options.session, options.socket)
    started = session.open(settings, owner_runs=pid is not None)
    if pid is not None:
        print(f"owner pid {pid} runs already at {manifest}")
    print(f"started in tmux session {session.name}: {', '.join(started) or 'nothing, all runs'}")
    if "worker" not in started:
        print("the worker was left alone; another one: ds4-profile restart")
    _show_report(settings)
    return _attach(options)


def _restart(options: argparse.Namespace) -> int:
    session = ProfileSession.find(options.session, options.socket)
    settings = _merged(session.settings(), options)
    tools.require(settings.tool)
    session.restart(settings)
    print(f"another worker runs in tmux session {session.name}; the owner was not touched")
    _show_report(settings)
    return 0


def _owner(model: str | None, manifest: str | None) -> tuple[str, int | None]:
    """(manifest, pid of the owner that answers there, or None). Raises UsageError when there is
    neither an owner nor a model to load."""
    named = manifest or os.environ.get(MANIFEST_VARIABLE)
    if named is None:
        if model is None:
            raise UsageError(f"name a model with -m, or an owner with --manifest (or in"
                             f" ${MANIFEST_VARIABLE})")  # fmt: skip
        named = private_owner.manifest_for(model, "auto")
    path = os.path.abspath(named)
    try:
        with client.connect(path, "status") as connection:
            return path, connection.owner_pid
    except OwnerUnavailable as silence:
        if model is None:
            raise UsageError(f"{silence}; or name the model to load with -m") from silence
        return path, None


def _merged(settings: Settings, options: argparse.Namespace) -> Settings:
    """Settings with what this command line says otherwise."""
    changes: dict[str, object] = {}
    for name, low in (("requests", 0), ("prompt_tokens", 1), ("max_tokens", 1), ("concurrency", 1)):
        value = getattr(options, name)
        if value is not None:
            if value < low:
                raise UsageError(f"--{name.replace('_', '-')} {value}: expected at least {low}")
            changes[name] = value
    if getattr(options, "tool", None) is not None:
        changes["tool"] = options.tool
    if getattr(options, "worker_flags", None):
        changes["worker_flags"] = tuple(options.worker_flags)
    return msgspec.structs.replace(settings, **changes)


def _address(options: argparse.Namespace) -> Address:
    """Where the worker is to serve. A path is the same in every window."""
    if options.port is not None and not 0 <= options.port <= 65535:
        raise UsageError(f"--port {options.port}: expected 0 to 65535")
    found = address.parse(options.host, options.port)
    if found.path:
        return Address(path=os.path.abspath(found.path))
    if not found.port and not options.name:
        raise UsageError("--port 0: the port that it becomes is found by a --name; give one")
    return found


def _target(options: argparse.Namespace) -> Target:
    """The worker that `load` is for."""
    if not options.name:
        if options.manifest or options.model:
            raise UsageError("--manifest and -m name the owner of a worker; give its --name, too")
        return target.at(_address(options))
    if options.host is not None or options.port is not None:
        raise UsageError("--name says where the worker is; leave out --host and --port")
    return target.named(options.name, _owner(options.model, options.manifest)[0])


def _print_commands(settings: Settings, pid: int | None) -> None:
    report = commands.report_path(settings)
    parts = [] if pid is not None else [("owner", commands.owner(settings))]
    parts += [("worker", commands.worker(settings, report)), ("status", commands.status(settings))]
    if settings.requests:
        parts.append(("load", commands.load(settings)))
    if pid is not None:
        print(f"# owner: pid {pid} runs already")
    for role, command in parts:
        print(f"# {role}\n{commands.shown(command)}")


def _show_report(settings: Settings) -> None:
    if settings.tool != tools.NO_TOOL:
        view = tools.TOOLS[settings.tool].view.format(report=f"{settings.folder}/worker-N...")
        print(f"a report is written when the worker ends (ds4-profile restart, or close): {view}")


def _attach(options: argparse.Namespace) -> int:
    """Shows the session in this terminal, where there is one. Does not return then."""
    tmux = ["tmux", *(["-L", options.socket] if options.socket else [])]
    inside = "TMUX" in os.environ and not options.socket
    look = [*tmux, "switch-client" if inside else "attach-session", "-t", options.session]
    if options.detach or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(f"look at it with: {commands.shown(look)}")
        return 0
    sys.stdout.flush()
    os.execvp(look[0], look)


if __name__ == "__main__":
    sys.exit(main())
