"""The `ds4-server` command: argv and environment to a `ServerConfig`, then `serve`.

Owns: flags, environment variables and exit codes of the worker; below this module only
XDG_RUNTIME_DIR (`paths`) and DS4_ISA (the native library) are read. Exit codes: 0 drained; 1 could
not start; 2 usage; 3 engine failure; 130 stopped at once. The imports are few and late on purpose:
this module is on the path from exec to the first answer.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from ds4_common.errors import Ds4Error, UsageError
from ds4_common.paths import MANIFEST_VARIABLE
from ds4_common.protocol import MAX_NAME_CHARS
from ds4_common.version import version_line
from ds4_worker import address, flags
from ds4_worker.config import ServerConfig
from ds4_worker.flags import Flag, Group, Options
from ds4_worker.model_flags import (
    ENGINE_FLAGS,
    MODEL_FLAGS,
    change_folder,
    engine_config,
    find_owner,
    refuse_other_backends,
)

USAGE = "ds4-server [-m FILE | --manifest FILE] [options]\n       ds4-server --version"

HTTP_FLAGS = Group(
    "HTTP",
    (
        Flag(
            ("--host",),
            "ADDRESS",
            "listen address, also [IPV6]:PORT; unix:PATH for a Unix socket (default: 127.0.0.1)",
        ),
        Flag(("--port",), "N", "listen port, 0 for any (default: 8000)"),
        Flag(
            ("--api-key",),
            "KEY",
            "required of clients; @FILE: its first line (default: $DS4_API_KEY)",
        ),
        Flag(("--api-key-file",), "FILE", "as --api-key @FILE (default: $DS4_API_KEY_FILE)"),
        Flag(("--cors",), "", "allow requests from web pages of any origin"),
        Flag(("--served-id",), "NAME", "another name that the model answers to; repeatable"),
        Flag(
            ("--tokens", "-n"),
            "N",
            "output limit of chat requests that set none (default: the context's end)",
        ),
        Flag(
            ("--ignore-eos-in-reasoning",),
            "",
            "the model cannot end an answer while it reasons (for models that do so too early)",
        ),
        Flag(("--ignore-eos",), "", "no request ends by end-of-sequence; wins over the former"),
        Flag(
            ("--tool-memory-max-ids",),
            "N",
            "tool calls whose exact text is remembered for later turns (default: 100000)",
        ),
        Flag(
            ("--disable-exact-dsml-tool-replay",),
            "",
            "render earlier tool calls by the template alone, whatever their syntax",
        ),
        Flag(("--max-queue",), "N", "sequences that wait beyond those running (default: 64)"),
        Flag(("--drain-seconds",), "S", "time for running requests after SIGTERM (default: 5)"),
    ),
)
RESTART_FLAGS = Group(
    "restart",
    (
        Flag(
            ("--takeover",),
            "",
            "replace the worker that serves this address, once this one is ready (default)",
        ),
        Flag(("--no-takeover",), "", "refuse to start while another worker serves this address"),
        Flag(
            ("--standby",),
            "",
            "load, then wait; serve when the worker that serves this address dies or stops",
        ),
        Flag(
            ("--zygote",),
            "",
            "stay, and fork workers: one that serves and one that waits (warm with --standby)",
        ),
        Flag(
            ("--reload",),
            "[PATH...]",
            "stay, and take over with a new worker whenever sources or these paths change",
        ),
        Flag(
            ("--park",),
            "on|off",
            "keep clients of a killed worker connected until the next one answers (default: on)",
        ),
        Flag(
            ("--name",),
            "NAME",
            "in the owner's books; workers of one name find the same --port 0 again",
        ),
    ),
)
ACCEPTED_FLAGS = Group(
    "accepted, without effect in this build",
    tuple(Flag((name,), "", "") for name in ("--cpu", "--no-update-check", "--warm-weights")),
)
GROUPS = (MODEL_FLAGS, ENGINE_FLAGS, HTTP_FLAGS, RESTART_FLAGS, ACCEPTED_FLAGS)


def server_config(argv: Sequence[str], environment: Mapping[str, str]) -> ServerConfig:
    """Raises UsageError for anything that is not as documented by --help."""
    refuse_other_backends(argv)
    options = flags.parse(argv, GROUPS)
    port = options.integer("--port", -1, 0, 65535)
    where = address.parse(options.text("--host"), None if port < 0 else port)
    wait = options.real("--wait-owner", 0, 86400)
    drain = options.real("--drain-seconds", 0, 86400)
    return ServerConfig(
        manifest=options.text("--manifest") or environment.get(MANIFEST_VARIABLE) or None,
        model=options.text("--model"),
        owner=options.text("--owner") or "auto",
        wait_owner_seconds=wait or 0.0,
        check_fingerprint=environment.get("DS4_WEIGHT_FP_CHECK") != "0",
        host=where.host,
        port=where.port,
        socket_path=where.path,
        api_key=api_key(options, environment),
        cors=options.given("--cors"),
        names=options.all("--served-id"),
        max_queue=options.integer("--max-queue", 64, 0, 1 << 20),
        max_tokens=options.integer("--tokens", 0, 1, 1 << 30) or None,
        ignore_eos=options.given("--ignore-eos"),
        ignore_eos_in_reasoning=options.given("--ignore-eos-in-reasoning"),
        tool_memory_ids=tool_memory_ids(options),
        drain_seconds=5.0 if drain is None else drain,
        name=worker_name(options.text("--name") or ""),
        takeover=takeover(options),
        standby="hot" if options.given("--standby") else "off",
        zygote=options.given("--zygote"),
        reload=options.all("--reload") if options.given("--reload") else None,
        park=options.choice("--park", ("on", "off")) == "on",
        engine=engine_config(options, 4, environment, nvtx=wants_ranges(environment)),
        folder=options.text("--chdir"),
    )


def wants_ranges(environment: Mapping[str, str]) -> bool:
    """Whether somebody asks for NVTX ranges, or told the NVTX library where to report them."""
    return environment.get("DS4_NVTX") == "1" or "NVTX_INJECTION64_PATH" in environment


def tool_memory_ids(options: Options) -> int:
    """0 when earlier tool calls are not to be replayed."""
    if options.given("--disable-exact-dsml-tool-replay"):
        return 0
    return options.integer("--tool-memory-max-ids", 100_000, 0, 1 << 30)


def takeover(options: Options) -> bool:
    """Whether to replace a worker that serves already."""
    if options.given("--takeover") and options.given("--no-takeover"):
        raise UsageError("--takeover and --no-takeover exclude each other")
    waits = options.given("--standby") and not options.given("--zygote")
    if waits and (options.given("--takeover") or options.given("--no-takeover")):
        raise UsageError("--standby waits for its turn; leave out --takeover and --no-takeover")
    if options.given("--reload"):
        for other in ("--standby", "--zygote", "--no-takeover"):
            if options.given(other):
                raise UsageError(f"--reload starts workers that take over; leave out {other}")
    return not options.given("--no-takeover")


def worker_name(name: str) -> str:
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise UsageError(f"--name {name!r}: expected at most {MAX_NAME_CHARS} printable characters")
    return name


def api_key(options: Options, environment: Mapping[str, str]) -> str | None:
    """The key that clients must send. Flags win over the environment."""
    key, file = options.text("--api-key"), options.text("--api-key-file")
    if key and file:
        raise UsageError("--api-key and --api-key-file exclude each other")
    if not key and not file:
        key, file = environment.get("DS4_API_KEY"), environment.get("DS4_API_KEY_FILE")
    return read_api_key(f"@{file}" if file and not key else key)


def read_api_key(value: str | None) -> str | None:
    """The key itself; `@FILE` names a file whose first line it is."""
    if not value:
        return None
    if not value.startswith("@"):
        return value
    try:
        with open(value[1:], encoding="utf-8") as file:
            key = file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key {value}: {error}") from error
    if not key:
        raise UsageError(f"--api-key {value}: the file's first line is empty")
    return key


def work(
    config: ServerConfig,
    tell: Callable[[str], None] = lambda news: None,
    *,
    python_ms: float = 0.0,
    began: float | None = None,
) -> int:
    """Runs one worker to its end; its exit code. `tell` hears "serving" and "yielded"."""
    began = time.perf_counter() if began is None else began
    try:
        from ds4_worker import loading, serve

        phases = loading.Phases()
        phases.add("python", python_ms)
        phases.add("import", (time.perf_counter() - began) * 1e3)
        manifest, use = find_owner(config.manifest, config.model, config.owner, config.engine.cuda)
        with (
            use,
            loading.connect(
                manifest,
                config.model,
                appear_seconds=config.wait_owner_seconds,
                check_fingerprint=config.check_fingerprint,
                role="worker" if config.standby == "off" else "standby",
                name=config.name,
            ) as connection,
        ):
            phases.end("attach")
            return serve.run(config, connection, phases, tell)
    except Ds4Error as error:
        print(f"ds4-server: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    python_ms = time.process_time() * 1e3  # CPU time until here: interpreter and first imports
    began = time.perf_counter()
    arguments = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until serve drains, Ctrl-C just ends it
    if "-h" in arguments or "--help" in arguments:
        print(flags.help_text(USAGE, GROUPS))
        return 0
    if list(arguments) == ["--version"]:
        print(version_line("ds4-server"))
        return 0
    try:
        config = server_config(arguments, os.environ)
        change_folder(config.folder)
        if config.reload is not None:
            from ds4_worker import reload

            return reload.run(flags.without(arguments, "--reload"), config.reload)
        if config.zygote:
            from ds4_worker import zygote

            return zygote.run(config, work)
    except Ds4Error as error:
        print(f"ds4-server: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return work(config, python_ms=python_ms, began=began)


if __name__ == "__main__":
    sys.exit(main())
