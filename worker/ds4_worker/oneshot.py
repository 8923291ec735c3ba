"""The `ds4` command: one answer, or a conversation, on the terminal.

Owns: its flags, where the prompt comes from, one-shot answers and dumps. It attaches like a server
does (the weights stay the owner's) and drives the engine in this thread (`session.py`). The
conversation is `repl.py`'s; `ds4 inspect TARGET` hands over to `inspect.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ds4_common.errors import Ds4Error, UsageError
from ds4_common.paths import MANIFEST_VARIABLE
from ds4_common.version import version_line
from ds4_worker import flags, model_flags
from ds4_worker.flags import Flag, Group, Options

if TYPE_CHECKING:
    from ds4_common.protocol import Welcome
    from ds4_worker.http.conversation import Decoding, Thinking
    from ds4_worker.http.prompt import Prompt
    from ds4_worker.session import Session

EXIT_INTERRUPTED = 130
MAX_TOP_LOGPROBS = 20

USAGE = """\
ds4 -p TEXT [-m FILE | --manifest FILE] [options]
       ds4 [-m FILE | --manifest FILE]        a conversation; /help tells more
       ds4 inspect TARGET
       ds4 --version"""

PROMPT_FLAGS = Group(
    "prompt",
    (
        Flag(("--prompt", "-p"), "TEXT", "answer this and end (- reads it from standard input)"),
        Flag(("--prompt-file",), "FILE", "answer the text of a file and end"),
        Flag(("--raw-prompt",), "", "continue the prompt as it stands, without the chat template"),
        Flag(
            ("--system", "-sys"), "TEXT", "system message (default: what the model's template says)"
        ),
        Flag(("--tokens", "-n"), "N", "output limit (default: the context's end)"),
        Flag(("--think",), "", "reason before answering (default, where the model can)"),
        Flag(("--think-max",), "", "reason as thoroughly as the model can"),
        Flag(("--nothink",), "", "answer at once"),
    ),
)
SAMPLING_FLAGS = Group(
    "sampling (defaults: the model's)",
    (
        Flag(("--temp",), "T", "temperature, 0 for the most likely token"),
        Flag(("--top-k",), "N", "keep the N best tokens, 0 for all"),
        Flag(("--top-p",), "P", "keep the best tokens of this mass"),
        Flag(("--min-p",), "P", "drop tokens below P times the best"),
        Flag(("--seed",), "N", "make the answer reproducible (default: random)"),
    ),
)
DUMP_FLAGS = Group(
    "dumps, in place of an answer",
    (
        Flag(("--dump-tokens",), "", "the prompt's tokens, one per line: id, tab, text as JSON"),
        Flag(
            ("--dump-logprobs",),
            "FILE",
            "answer at temperature 0 unless --temp says otherwise, and write each token with its"
            " best alternatives to FILE as JSON (- for standard output)",
        ),
        Flag(("--logprobs-top-k",), "N", "alternatives per token, 0 to 20 (default: 20)"),
    ),
)
ACCEPTED_FLAGS = Group(
    "accepted, without effect in this build",
    tuple(Flag((name,), "", "") for name in ("--cpu", "--no-update-check")),
)
GROUPS = (
    *(PROMPT_FLAGS, SAMPLING_FLAGS, DUMP_FLAGS),
    *(model_flags.MODEL_FLAGS, model_flags.ENGINE_FLAGS, ACCEPTED_FLAGS),
)


def decoding_of(options: Options) -> Decoding:
    """The sampling flags in neutral form, so that one place gives them meaning and defaults."""
    from ds4_worker.http.conversation import Decoding

    def integer(name: str, high: int) -> int | None:
        return options.integer(name, 0, 0, high) if options.given(name) else None

    temperature = options.real("--temp", 0, 100)
    if temperature is None and options.given("--dump-logprobs"):
        temperature = 0.0
    return Decoding(
        temperature=temperature,
        top_p=options.real("--top-p", 0, 1),
        min_p=options.real("--min-p", 0, 1),
        top_k=integer("--top-k", (1 << 31) - 1),
        seed=integer("--seed", (1 << 64) - 1),
        max_tokens=options.integer("--tokens", 0, 1, 1 << 30) or None,
        paths={"max_tokens": "--tokens"},
    )


def thinking_of(options: Options) -> Thinking:
    """Raises UsageError for flags that contradict each other."""
    from ds4_worker.http.conversation import Thinking

    given = [flag for flag in ("--think", "--think-max", "--nothink") if options.given(flag)]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other")
    if not given:
        return Thinking()
    return Thinking(
        enabled=given != ["--nothink"], effort="max" if given == ["--think-max"] else None
    )


def check_dumps(options: Options, prompt: str | None) -> None:
    """Raises UsageError for dumps that cannot be made, before anything is loaded."""
    dumps = [flag for flag in ("--dump-tokens", "--dump-logprobs") if options.given(flag)]
    if len(dumps) > 1:
        raise UsageError(f"{' and '.join(dumps)} exclude each other")
    if dumps and prompt is None:
        raise UsageError(f"{dumps[0]} needs a prompt: -p TEXT or --prompt-file FILE")
    if options.given("--logprobs-top-k") and "--dump-logprobs" not in dumps:
        raise UsageError("--logprobs-top-k: needs --dump-logprobs FILE")
    options.integer("--logprobs-top-k", 0, 0, MAX_TOP_LOGPROBS)


def open_session(options: Options, environment: Mapping[str, str]) -> Session:
    """Attaches, waiting for an owner that is still loading, with its progress on a terminal."""
    decoding = decoding_of(options)
    config = model_flags.engine_config(options, 1, environment)
    model = options.text("--model")
    named = options.text("--manifest") or environment.get(MANIFEST_VARIABLE) or None
    wait = options.real("--wait-owner", 0, 86400)
    check = environment.get("DS4_WEIGHT_FP_CHECK") != "0"
    from ds4_worker import loading
    from ds4_worker.session import Session

    manifest, use = model_flags.find_owner(
        named, model, options.text("--owner") or "auto", config.cuda
    )
    with use:
        connection = loading.connect(
            manifest, model, appear_seconds=wait or 0.0, check_fingerprint=check
        )
        loading.wait_until_ready(
            connection, model, check_fingerprint=check, progress=_show_progress
        )
    return Session(connection, config, decoding)


def _show_progress(welcome: Welcome) -> None:
    if sys.stderr.isatty():
        done, total = welcome.progress.done_bytes, welcome.progress.total_bytes
        percent = 100 * done // total if total else 0
        end = "\n" if welcome.state == "ready" else ""
        print(f"\rloading: {percent:3d} %", end=end, file=sys.stderr, flush=True)


def prepared(session: Session, text: str, options: Options) -> Prompt:
    """The one prompt, as the flags want it. Raises RequestError."""
    from ds4_worker.http.conversation import Turn

    if options.given("--raw-prompt"):
        return session.raw_prompt(text)
    turns = [Turn(role="user", content=text)]
    if system := options.text("--system"):
        turns.insert(0, Turn(role="system", content=system))
    return session.prompt(turns, thinking_of(options))


def run_once(session: Session, text: str, options: Options) -> int:
    """Answers, or dumps; the exit code."""
    signal.signal(signal.SIGINT, session.interrupt)
    prompt = prepared(session, text, options)
    if options.given("--dump-tokens"):
        from ds4_worker import dumps

        dumps.tokens(session.model.tokenizer, prompt.ids, sys.stdout)
    elif path := options.text("--dump-logprobs"):
        from ds4_worker import dumps

        top = options.integer("--logprobs-top-k", MAX_TOP_LOGPROBS, 0, MAX_TOP_LOGPROBS)
        dumps.logprobs(session, prompt, top, path)
    else:
        from ds4_worker.display import Display

        display = Display()
        display.show(session.answer(prompt), session.pace)
        display.conclude(session.pace, session.finished)
    return EXIT_INTERRUPTED if session.interrupted else 0


def find_prompt(options: Options) -> str | None:
    """The one prompt to answer, or None for a conversation."""
    prompt, file = options.text("--prompt"), options.text("--prompt-file")
    if prompt is not None and file is not None:
        raise UsageError("--prompt and --prompt-file: give one of them")
    if file is not None:
        prompt = flags.read_text(file)
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise UsageError("the prompt is empty")
    return prompt


def inspect_target(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError("usage: ds4 inspect TARGET, a GGUF file or an owner's manifest")
    from ds4_worker.inspect import inspect

    print(inspect(arguments[0]))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is an answer to interrupt
    try:
        if arguments[:1] == ["inspect"]:
            return inspect_target(arguments[1:])
        if "-h" in arguments or "--help" in arguments:
            print(flags.help_text(USAGE, GROUPS))
            return 0
        if arguments == ["--version"]:
            print(version_line("ds4"))
            return 0
        model_flags.refuse_other_backends(arguments)
        options = flags.parse(arguments, GROUPS)
        model_flags.change_folder(options.text("--chdir"))
        thinking = thinking_of(options)
        prompt = find_prompt(options)
        check_dumps(options, prompt)
        session = open_session(options, os.environ)
        if prompt is not None:
            return run_once(session, prompt, options)
        from ds4_worker import repl

        return repl.converse(session, options.text("--system"), thinking, os.environ)
    except BrokenPipeError:
        # The reader of our output left (`ds4 ... | head`); nothing is lost.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Ds4Error as error:
        print(f"ds4: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
