"""The flags of `ds4-bench`. What each measurement makes of them is its own business."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ds4_common.version import version_line
from ds4_worker.bench import compare, gpu, synthetic


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_positive(depth) for depth in text.split(",")]


def build_parser(measurements: Mapping[str, str]) -> argparse.ArgumentParser:
    """`measurements`: their names, and what each measures."""
    listing = "\n".join(f"  {name:10} {text}" for name, text in measurements.items())
    parser = argparse.ArgumentParser(
        prog="ds4-bench",
        description=f"Measures on this machine; keep it otherwise idle.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version_line(parser.prog))
    parser.add_argument("what", choices=measurements, metavar="MEASUREMENT")
    parser.add_argument("-m", "--model", help="GGUF file (default: the one `make model` fetched)")
    parser.add_argument(
        "-n", "--runs", type=_positive, default=9, help="runs per median (default 9)"
    )
    parser.add_argument("-t", "--threads", type=int, default=0, help="default: one per core")
    parser.add_argument(
        "--depths", type=_numbers, default="16,512,2048", help="of decode and prefill, in tokens"
    )
    parser.add_argument(
        "--steps", type=_positive, default=64, help="decode steps per run (default 64)"
    )
    parser.add_argument("--streams", type=_positive, default=4, help="sequences decoding together")
    parser.add_argument(
        "--serve-streams", type=_numbers, default="1,8", help="serve: chats at once (default 1,8)"
    )
    parser.add_argument(
        "--tokens", type=_positive, default=128, help="serve: of each answer (default 128)"
    )
    parser.add_argument(
        "--extra-gb",
        type=float,
        default=0.0,
        help="restart and attach again with that many GB of further ranges in the manifest",
    )
    parser.add_argument(
        "--restarts",
        type=_positive,
        default=200,
        help="succession: so many takeovers, and so many kills, under load (default 200)",
    )
    parser.add_argument(
        "--per-second",
        type=float,
        default=50.0,
        help="succession: requests per second meanwhile (default 50)",
    )
    parser.add_argument(
        "--mapped-gb", type=float, default=4.0, help="succession: mapped by the process that dies"
    )
    parser.add_argument(
        "--clients", type=int, default=0, help="attach: also that many processes at once"
    )
    parser.add_argument(
        "--peer-cmd",
        help="decode: another OpenAI-compatible server for the same requests; {port} is replaced",
    )
    parser.add_argument(
        "--shape",
        choices=synthetic.SHAPES,
        default="moe-30b",
        help="write, large, experts (%(default)s)",
    )
    parser.add_argument(
        "--types",
        default="Q8_0,IQ2_XXS,Q2_K",
        help="write, large, experts: of matrices, of experts' gate and up, and down (%(default)s)",
    )
    parser.add_argument("--out", help="write, layouts: the file to make")
    parser.add_argument("--only", help="layouts: these types; the others keep their figures")
    parser.add_argument(
        "--compare",
        default=",".join(compare.TYPES),
        help="compare: the types to make models of (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt",
        type=_numbers,
        default="512",
        help="compare: tokens of prompts, like 512,4096 (default %(default)s)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=4096,
        help="compare: also decode that far into a context; 0: not (default %(default)s)",
    )
    parser.add_argument(
        "--peer-single",
        default="",
        help="compare: the peer's program for one sequence (llama.cpp's -bench)",
    )
    parser.add_argument(
        "--peer-batched", default="", help="compare: and for several (its -batched-bench)"
    )
    gpu.add_flags(parser)
    parser.add_argument("--csv", help="also write the rows to this file")
    return parser
