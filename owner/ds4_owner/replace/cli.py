"""`ds4-weight-server preflight` and `ds4-weight-server replace`.

Owns their flags, the choice of the owner that is meant, and what is printed. `preflight`, and
`replace --dry-run`, only look. Flags that are not listed here are the next owner's. Exit codes:
preflight 0 fits, 1 does not; replace 0 replaced, 1 refused somewhere (the journal says where);
2 usage.
"""

from __future__ import annotations

import argparse
import glob
import os
import secrets
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from ds4_common import paths
from ds4_common.errors import Ds4Error, OwnerUnavailable, UsageError
from ds4_owner import status
from ds4_owner.arguments import Parser
from ds4_owner.progress import size
from ds4_owner.replace import machine, run, starts, stops
from ds4_owner.replace.forecast import Forecast, forecast
from ds4_owner.replace.log import Journal, steps_done
from ds4_owner.replace.plan import Plan, Settings, planned_starts, survey

JOURNAL = ".replace.jsonl"
INTERRUPTED = 130
CLEAR_CACHE = "/usr/local/bin/clear_cache"
DEADLINES = (
    ("--worker-seconds", "for workers to drain and end after SIGTERM"),
    ("--owner-seconds", "for the owner to end after SIGTERM"),
    ("--memory-seconds", "for memory to come back and pressure to go"),
    ("--ready-seconds", "for the next owner to load, and for each worker to answer"),
)


def _parser(command: str) -> argparse.ArgumentParser:
    usage = f"ds4-weight-server {command} NEW.gguf [options]"
    parser = Parser(prog=f"ds4-weight-server {command}", usage=usage, allow_abbrev=False,
                     epilog="Other flags are the next owner's; what it is not given, it takes over"
                     " from the running one, except what speaks of the old model.")  # fmt: skip
    parser.add_argument("--manifest", metavar="FILE", help="of the owner to replace (default:"
                        " DS4_CUDA_WEIGHT_IPC_MANIFEST, else the only private owner)")  # fmt: skip
    if command == "preflight":
        parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
        return parser
    parser.add_argument("--dry-run", action="store_true", help="only look, print what would be"
                        " done; exit 0: it fits")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on where the journal"
                        " ends; NEW.gguf and flags given replace those recorded")  # fmt: skip
    parser.add_argument("--forget", action="store_true", help="begin anew although the journal"
                        " holds an unfinished replacement")  # fmt: skip
    parser.add_argument("--log", metavar="FILE", help="journal (default: MANIFEST.replace.jsonl)")
    parser.add_argument("--clear-cache-cmd", metavar="COMMAND", help="run when the old owner is"
                        f" gone; '' for none (default: {CLEAR_CACHE} where present)")  # fmt: skip
    parser.add_argument("--worker-cmd", metavar="COMMAND", help="start this, in place of the"
                        " workers that ran")  # fmt: skip
    parser.add_argument("--no-worker", action="store_true", help="start none")
    parser.add_argument("--kill", action="store_true", help="SIGKILL to workers (never an owner)"
                        " that are still there after their deadline")  # fmt: skip
    parser.add_argument("--prompt", metavar="TEXT", help="what to ask in the end")
    for flag, text in DEADLINES:
        default = getattr(Settings(), flag[2:].replace("-", "_"))
        parser.add_argument(flag, metavar="S", type=float, help=f"{text} (default: {default:g})")
    return parser


def main(arguments: Sequence[str]) -> int:
    """`arguments` begin with the subcommand. Returns the exit code; raises Ds4Error."""
    command, *rest = arguments
    # Taken off by hand: argparse would take the value of an owner's flag for it.
    model = rest.pop(0) if rest and not rest[0].startswith("-") else None
    options, given = _parser(command).parse_known_args(rest)
    if model is None and not (command == "replace" and options.resume):
        raise UsageError(f"{command} needs a model first: ds4-weight-server {command} NEW.gguf")
    if command == "preflight":
        return _preflight(str(model), options, given)
    return _replace(model, options, given)


def _say(text: str) -> None:
    print(text, flush=True)


# Looking


def _preflight(model: str, options: argparse.Namespace, given: list[str]) -> int:
    settings = Settings(clear_cache=_clear_cache(None))
    return _look(survey(_manifest(options, model), model, given, settings), as_json=options.json)


def _look(plan: Plan, *, as_json: bool) -> int:
    plan.config(os.environ)
    found = forecast(plan, os.environ, returned=True)
    problems = plan.problems()
    if as_json:
        rows, source = machine.list_processes(stops.marks(plan))
        document: dict[str, Any] = {
            "fits": found.fits, "problems": problems, "budget": found, "processes": rows,
            "processes_from": source, "machine": machine.read_machine(), "steps": steps(plan),
            "owner": plan.owner and plan.owner.identity, "notes": plan.notes,
            "workers": [worker.identity for worker in plan.workers], "left_out": plan.left_out,
        }  # fmt: skip
        _say(msgspec.json.encode(document).decode())
    else:
        _print_look(plan, found, problems)
    return 0 if found.fits and not problems else 1


def _print_look(plan: Plan, found: Forecast, problems: list[str]) -> None:
    rows, source = machine.list_processes(stops.marks(plan))
    sections = (
        (f"processes ({source})", machine.process_lines(rows)),
        ("machine", [str(machine.read_machine())]),
        (f"budget of {plan.model}", found.lines),
        ("replace would", [f"{n}. {step}" for n, step in enumerate(steps(plan), 1)]),
        ("notes", [*plan.notes, *(f"not taken over: {flags}" for flags in plan.left_out)]),
        ("PROBLEMS", problems),
    )
    for title, lines in sections:
        if lines:
            _say(title)
            for line in lines:
                _say(f"  {line}")


def steps(plan: Plan) -> list[str]:
    """What a replacement would do, a line per step."""
    settings, lines = plan.settings, []
    for worker in plan.workers:
        places = ", ".join(map(str, worker.listening)) or "no socket"
        lines.append(f"stop {worker.role} pid {worker.identity.pid} ({places})")
    if plan.owner is not None:
        held = size(plan.owner.allocated_bytes)
        lines.append(f"stop owner pid {plan.owner.identity.pid} and wait for {held}")
    if settings.clear_cache:
        lines.append(f"run {shlex.join(settings.clear_cache)}")
    lines.append("check memory, swap, pressure and the budget again")
    lines.append(f"start {shlex.join(starts.owner_command(plan))}")
    workers = [f"start {shlex.join(start.argv)}" for _, start in planned_starts(plan)]
    lines += [*workers, f"ask {settings.prompt!r}"] if workers else ["start no worker"]
    return lines


# Replacing


def _replace(model: str | None, options: argparse.Namespace, given: list[str]) -> int:
    manifest = _manifest(options, model)
    settings = _changed(Settings(clear_cache=_clear_cache(None)), options)
    if options.dry_run and model is not None:
        return _look(survey(manifest, model, given, settings), as_json=False)
    with Journal(options.log or manifest + JOURNAL) as journal:
        try:
            if options.resume:
                return _resume(journal, model, options, given)
            if steps_done(journal.unfinished()) - {"inspect"} and not options.forget:
                raise UsageError(
                    f"{journal.path} holds an unfinished replacement: --resume goes on with it,"
                    " --forget begins anew"
                )
            assert model is not None
            return _begin(journal, survey(manifest, model, given, settings))
        except KeyboardInterrupt:
            _say(f"interrupted; --resume goes on (journal: {journal.path})")
            return INTERRUPTED


def _begin(journal: Journal, plan: Plan) -> int:
    _refuse_before_stopping(plan)
    journal.run = secrets.token_hex(8)
    journal.write("plan", **msgspec.to_builtins(plan))
    return run.execute(plan, journal, (), _say)


def _refuse_before_stopping(plan: Plan) -> None:
    """Raises Ds4Error while everything still runs."""
    if problems := plan.problems():
        raise Ds4Error(f"nothing was stopped: {'; '.join(problems)}")
    found = forecast(plan, os.environ, returned=True)
    if not found.fits:
        raise Ds4Error(f"nothing was stopped: {plan.model} would not fit: {found.refusal}")
    again = survey(plan.old_manifest, plan.model, plan.options, plan.settings)
    # Pids that were read and looked up are those of the same processes only if they still lease.
    if (again.owner, [w.identity for w in again.workers]) != (
        plan.owner, [w.identity for w in plan.workers],
    ):  # fmt: skip
        raise OwnerUnavailable("owner or workers changed while they were looked at; run it again")


def _resume(
    journal: Journal, model: str | None, options: argparse.Namespace, given: list[str]
) -> int:
    """Goes on with the recorded plan, and what the operator changed about it."""
    unfinished = journal.unfinished()
    if not unfinished:
        raise UsageError(f"{journal.path}: there is no unfinished replacement to resume")
    try:
        plan = msgspec.convert(journal.facts("plan") or {}, Plan)
    except msgspec.ValidationError as error:
        raise UsageError(f"{journal.path}: its plan is of another version: {error}") from error
    changed = plan.changed(model, given, _changed(plan.settings, options))
    changed.config(os.environ)
    if changed != plan:
        journal.write("plan", **msgspec.to_builtins(changed))
    return run.execute(changed, journal, steps_done(unfinished), _say)


def _manifest(options: argparse.Namespace, model: str | None) -> str:
    """Of the owner that is meant. Without one: of the newest journal, when one is to be resumed;
    else the one that a private owner of the model would have."""
    try:
        return os.path.abspath(status.only_owner(options.manifest))
    except OwnerUnavailable:
        journals = glob.glob(os.path.join(glob.escape(paths.owners_folder()), f"*{JOURNAL}"))
        if getattr(options, "resume", False) and journals:
            return max(journals, key=os.path.getmtime).removesuffix(JOURNAL)
        if model is None:
            raise
        return paths.private_manifest(model)


def _changed(settings: Settings, options: argparse.Namespace) -> Settings:
    changes: dict[str, Any] = {}
    for flag, _ in DEADLINES:
        name = flag[2:].replace("-", "_")
        value = getattr(options, name)
        if value is not None:
            if not 0 <= value <= 86400:
                raise UsageError(f"{flag}: got {value:g}, expected 0 to 86400 seconds")
            changes[name] = value
    if options.clear_cache_cmd is not None:
        changes["clear_cache"] = _clear_cache(options.clear_cache_cmd)
    if options.worker_cmd is not None:
        changes["worker_command"] = _words("--worker-cmd", options.worker_cmd)
    if options.no_worker:
        changes["with_worker"] = False
    if options.kill:
        changes["kill"] = True
    if options.prompt is not None:
        changes["prompt"] = options.prompt
    return msgspec.structs.replace(settings, **changes)


def _clear_cache(given: str | None) -> list[str]:
    if given is None:
        return [CLEAR_CACHE] if os.access(CLEAR_CACHE, os.X_OK) else []
    return _words("--clear-cache-cmd", given)


def _words(flag: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}: {error}") from error
