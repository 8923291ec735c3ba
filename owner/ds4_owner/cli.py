"""The `ds4-weight-server` command: flags to OwnerConfig, subcommands, exit codes.

Exit codes: 0 help, clean stop, dry run passed; 2 usage; 1 everything else. Owns argv and the
environment of an owner; subcommands parse their own, NOTIFY_SOCKET is `notify`'s. Flag names,
defaults and clamps are those of the published server, so existing scripts keep working.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from ds4_common.errors import Ds4Error, UsageError
from ds4_common.version import version_line
from ds4_owner import config as c
from ds4_owner.arguments import Parser
from ds4_owner.progress import log

USAGE = """\
ds4-weight-server --base FILE [--mtp FILE] [--drafter FILE] --manifest FILE [options]
       ds4-weight-server plan FILE [--json | --contract] [options]
       ds4-weight-server status [--manifest FILE] [--json]
       ds4-weight-server stop [--manifest FILE]
       ds4-weight-server reexec [--manifest FILE]
       ds4-weight-server verify [--manifest FILE] [--rate GB/s] [--accept] [--json]
       ds4-weight-server preflight NEW.gguf [--manifest FILE] [--json] [options]
       ds4-weight-server replace NEW.gguf [--manifest FILE] [--dry-run | --resume] [options]
       ds4-weight-server top [--manifest FILE]"""
SUBCOMMANDS = ("status", "stop", "reexec")


# group -> (flag, name of its value, help); flags that are more than one value are in build_parser.
VALUES = {
    "models": (
        ("--base", "FILE", "base model; a split one by its first shard"),
        ("--mtp", "FILE", "multi-token-prediction sidecar"),
        ("--drafter", "FILE", "also serve a drafter GGUF, raw ranges only, whatever the scope"),
        ("--served-id", "NAME", "model name that workers report (default: from the metadata)"),
    ),
    "sharing": (
        ("--manifest", "FILE", "where to describe the weights; required unless --dry-run"),
        ("--broker-socket", "FILE", "at most 107 bytes (default: <manifest>.sock)"),
        ("--device", "N", "CUDA device ordinal (default: 0)"),
        ("--lock-file", "FILE", "default: /tmp/ds4_weight_server_cuda<N>.lock"),
        ("--exit-on-parent-pid", "N", "stop when process N is gone (default: 0, off)"),
        ("--metrics-port", "N", "Prometheus metrics at 127.0.0.1, 0 for any port (default: off)"),
    ),
    "loading": (
        ("--span-mb", "N", "size a range grows to by whole tensors, 64..4096 (default: 1024)"),
        ("--copy-chunk-mb", "N", "bytes between two memory checks, 16..1024 (default: 256)"),
        (
            "--reserve-gb", "N",
            "memory to leave free, in GiB; 0 disables the check. Default: 32; on memfd and shm the"
            " smaller of 32 and a tenth of the memory, so that small machines can serve too",
        ),
    ),
    "artifacts": (
        ("--derive-group-count", "N", "column groups of the norms, 1..16 (default: 8)"),
        (
            "--derive-budget-gb", "N",
            "most memory for norms and dequantized tensors, in GiB; 0 is unlimited (default: 4)",
        ),
        (
            "--repack-threads", "N",
            "loader threads, at most 16 (default: DS4_WS_REPACK_THREADS, else the smaller of 6 and"
            " the number of cores)",
        ),
    ),
}  # fmt: skip
REPACKS = {
    "--repack-iq2-aligned": "aligned IQ2_XXS and IQ2_XS experts in place of raw (default: on)",
    "--repack-q2k-aligned": "aligned Q2_K experts in place of raw (default: on)",
    "--repack-q8-aligned": (
        "aligned Q8_0 dense tensors beside raw. Default: on for vmm and ipc; off for memfd and shm,"
        " where nothing reads them and they double the memory"
    ),
}
BACKENDS_HELP = (
    "memory to share: memfd (sealed host memory), shm (POSIX shared memory), vmm or ipc (CUDA)."
    " Default: vmm where a CUDA driver is found, else memfd"
)
LAYOUTS_HELP = (
    "on memfd and shm: packed stores weight matrices in the layouts of the CPU kernels in place of"
    " their raw blocks, aligned the same but all experts that can in the published artifacts, raw"
    " serves the file's blocks and those artifacts, which GPU workers read too, auto packs what a"
    " CPU worker can run (default: auto)"
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the owner itself (`status` and `stop` parse their own flags)."""
    parser = Parser(prog="ds4-weight-server", usage=USAGE, allow_abbrev=False,
                     description="Loads GGUF weights once and hands them to workers.")  # fmt: skip
    parser.add_argument("--version", action="version", version=version_line(parser.prog))
    groups = {name: parser.add_argument_group(name) for name in VALUES}
    for name, flags in VALUES.items():
        for flag, metavar, text in flags:
            groups[name].add_argument(flag, metavar=metavar, help=text)
    scopes = ("both", "base", "mtp")
    groups["models"].add_argument("--scope", default="both", choices=scopes, help="default: both")
    backends = ("memfd", "shm", "vmm", "ipc")
    groups["sharing"].add_argument("--backend", choices=backends, help=BACKENDS_HELP)
    groups["sharing"].add_argument("--no-lock", action="store_true", help="take no lock")
    layouts = ("auto", "raw", "packed", "aligned")
    loading = groups["loading"]
    loading.add_argument("--cpu-layout", default="auto", choices=layouts, help=LAYOUTS_HELP)
    loading.add_argument("--dry-run", action="store_true", help="print plan and budget, then exit")
    _add_artifact_flags(groups["artifacts"])
    return parser


def _add_artifact_flags(group: argparse._ArgumentGroup) -> None:
    for flag, text in REPACKS.items():
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    for kind in ("f16", "f32"):
        text = f"also serve a Q8_0 tensor dequantized to {kind} (repeatable)"
        group.add_argument(f"--derive-q8-{kind}", action="append", default=[], metavar="TENSOR",
                           help=text)  # fmt: skip
    norms = "also serve the row-group norms of output.weight"
    group.add_argument("--derive-output-certifier", action="store_true", help=norms)
    hashes = "print the FNV-1a hash of each artifact (also DS4_WS_REPACK_HASH=1)"
    group.add_argument("--repack-hash", action="store_true", help=hashes)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> c.OwnerConfig:
    """Flags and environment to a configuration. Raises UsageError."""
    args = build_parser().parse_args(argv)
    _check_required(args)
    backend = args.backend or default_backend()
    repacks = _repacks(args, backend)
    groups = 8 if args.derive_group_count is None else c.leading_integer(args.derive_group_count)
    if groups is None or not 1 <= groups <= 16:
        raise UsageError(f"invalid --derive-group-count {args.derive_group_count}; expected 1..16")
    device = c.leading_integer(args.device or "0") or 0
    lock_file = args.lock_file
    if lock_file is None:
        lock_file = f"/tmp/ds4_weight_server_cuda{device}.lock"
    reserve = c.leading_integer(args.reserve_gb) if args.reserve_gb is not None else None
    derive_budget = c.leading_integer(args.derive_budget_gb or "")
    socket_path = args.broker_socket
    if socket_path is None and args.manifest is not None:
        socket_path = f"{args.manifest}.sock"
    return c.OwnerConfig(
        base=args.base, mtp=args.mtp, drafter=args.drafter, manifest=args.manifest,
        scope=args.scope, backend=backend, device=device, broker_socket=socket_path,
        lock_file=None if args.no_lock or not lock_file else lock_file,
        exit_on_parent_pid=c.leading_integer(args.exit_on_parent_pid or "") or 0,
        span_bytes=c.mebibytes(args.span_mb, 1024, 64, 4096),
        copy_chunk_bytes=c.mebibytes(args.copy_chunk_mb, 256, 16, 1024),
        reserve_bytes=None if reserve is None else reserve * c.GIB,
        derive_output_certifier=args.derive_output_certifier, derive_group_count=groups,
        derive_q8_f16=tuple(args.derive_q8_f16), derive_q8_f32=tuple(args.derive_q8_f32),
        derive_budget_bytes=(4 if derive_budget is None else derive_budget) * c.GIB,
        repack_iq2=repacks["iq2"], repack_q2k=repacks["q2k"], repack_q8=repacks["q8"],
        repack_threads=c.repack_threads(args.repack_threads, environ),
        repack_hash=args.repack_hash or environ.get("DS4_WS_REPACK_HASH") == "1",
        cpu_layout=args.cpu_layout, served_id=args.served_id, dry_run=args.dry_run,
        direct_io=not environ.get("DS4_CUDA_NO_DIRECT_IO"),
        preflight=not environ.get("DS4_WEIGHT_SERVER_NO_PREFLIGHT"),
        metrics_port=_port(args.metrics_port),
    )  # fmt: skip


def _port(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise UsageError(f"--metrics-port {text}: expected 0 to 65535")
    return int(text)


def _check_required(args: argparse.Namespace) -> None:
    if args.scope != "mtp" and not args.base:
        raise UsageError(f"--scope {args.scope} needs --base FILE")
    if args.scope != "base" and not args.mtp:
        raise UsageError(f"--scope {args.scope} needs --mtp FILE; for one model: --scope base")
    if not args.manifest and not args.dry_run:
        raise UsageError("--manifest FILE is required unless --dry-run is given")


def _repacks(args: argparse.Namespace, backend: str) -> dict[str, bool]:
    """Which repacks are on: defaults drop silently without a base model, requests are refused."""
    asked = {
        "iq2": args.repack_iq2_aligned,
        "q2k": args.repack_q2k_aligned,
        "q8": args.repack_q8_aligned,
    }
    if args.scope == "mtp":
        derived = args.derive_output_certifier or args.derive_q8_f16 or args.derive_q8_f32
        if any(asked.values()) or derived:
            raise UsageError("derived artifacts currently require base scope")
        return dict.fromkeys(asked, False)
    defaults = {"iq2": True, "q2k": True, "q8": backend not in c.HOST_BACKENDS}
    return {name: defaults[name] if value is None else value for name, value in asked.items()}


def default_backend() -> c.BackendName:
    """vmm where a CUDA driver answers and its bindings are installed, memfd everywhere else."""
    from ds4_owner.backends.cuda import usable

    return "vmm" if usable() else "memfd"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ds4-weight-server`; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        log(str(error))
        print(f"usage: {USAGE}\nSee ds4-weight-server --help.", file=sys.stderr)
        return UsageError.exit_code
    except Ds4Error as error:
        log(str(error))
        return error.exit_code
    except BrokenPipeError:  # of stdout: its reader left (`status | head`), and nothing is lost
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command in SUBCOMMANDS:
        from ds4_owner import status

        return status.main(arguments)
    if command in ("preflight", "replace"):
        from ds4_owner.replace import cli as replacing

        return replacing.main(arguments)
    if command == "verify":
        from ds4_owner import verify

        return verify.main(arguments[1:])
    if command == "top":
        from ds4_owner import top

        return top.main(arguments[1:])
    if command == "plan":
        config = _parse_plan([a for a in arguments[1:] if a not in ("--json", "--contract")])
        if "--contract" in arguments:
            from ds4_owner.preview import write_contract

            return write_contract(config)
        from ds4_owner.planning import print_plan

        return print_plan(config, as_json="--json" in arguments)
    settings = parse(arguments, os.environ)
    from ds4_owner.supervisor import run

    return run(settings, arguments)


def _parse_plan(arguments: list[str]) -> c.OwnerConfig:
    """`plan FILE [options]`: a dry run of one base model with the scope it implies."""
    if arguments and arguments[0] in ("-h", "--help"):
        return parse(arguments[:1], os.environ)
    if not arguments or arguments[0].startswith("-"):
        raise UsageError("plan needs a GGUF file: ds4-weight-server plan FILE [--json]")
    scope = [] if "--scope" in arguments else ["--scope", "base"]
    return parse(["--base", arguments[0], "--dry-run", *scope, *arguments[1:]], os.environ)


if __name__ == "__main__":
    sys.exit(main())
