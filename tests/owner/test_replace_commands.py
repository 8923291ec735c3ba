"""How a replacement words command lines and its journal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4_common import paths
from ds4_common.errors import UsageError
from ds4_owner.replace import commands
from ds4_owner.replace.log import Journal, JournalBusy, steps_done

# Command lines


def test_an_owner_takes_over_how_it_runs_and_nothing_of_the_old_model() -> None:
    running = (
        "--base old.gguf --manifest w --scope=base --backend memfd --lock-file lock --span-mb 512"
        " --no-repack-q8-aligned --drafter d.gguf --served-id old --derive-q8-f16 t --reserve-gb 8"
        " --exit-on-parent-pid 5"
    ).split()
    found = commands.next_owner(running, "/run", ["--reserve-gb", "4"], "/here", "/run/w", "/run/w")
    assert (
        list(found.options)
        == (
            "--scope base --backend memfd --lock-file /run/lock --span-mb 512"
            " --no-repack-q8-aligned --reserve-gb 4"
        ).split()
    )
    assert found.left_out == (
        "--drafter d.gguf", "--served-id old", "--derive-q8-f16 t", "--exit-on-parent-pid 5",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("running", "given_", "expected"),
    [
        ("", "", "--scope base"),
        ("", "--mtp m.gguf", "--mtp /here/m.gguf --scope both"),
        ("--repack-q8-aligned", "--no-repack-q8-aligned", "--no-repack-q8-aligned --scope base"),
        ("--no-lock", "--lock-file l", "--lock-file /here/l --scope base"),
        ("--lock-file /o/k.lock", "", "--lock-file /o/n.lock --scope base"),  # a private owner's
        ("--scope base", "--scope both --mtp /m", "--scope both --mtp /m"),
    ],
)
def test_given_flags_win_over_running_ones(running: str, given_: str, expected: str) -> None:
    found = commands.next_owner(running.split(), "/o", given_.split(), "/here", "/o/k", "/o/n")
    assert " ".join(found.options) == expected


@pytest.mark.parametrize(
    "flags", ["stray", "--reserve-gb", "--base x", "--manifest x", "--dry-run", "--scope mtp"]
)
def test_flags_that_a_replacement_cannot_mean_are_refused(flags: str) -> None:
    with pytest.raises(UsageError):
        commands.next_owner([], "/", flags.split(), "/", "/w", "/w")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-m old.gguf --port 1", "-m /new --port 1"),
        ("--model old.gguf", "--model /new"),
        ("--model=old.gguf", "--model=/new"),
        ("-mold.gguf", "-m/new"),
        ("--manifest w -c 5", "--manifest /o/n -c 5"),
        ("--manifest=/o/w", "--manifest=/o/n"),
        ("--owner /o/w -m a", "--owner /o/n -m /new"),
        ("--manifest /other", "--manifest /other"),
        ("--port 8000", "--port 8000"),
    ],
)
@pytest.mark.parametrize("program", ["python -m ds4_worker.cli", "/v/python /v/bin/ds4-server"])
def test_a_worker_keeps_its_flags_but_for_model_and_manifest(
    program: str, words: str, expected: str
) -> None:
    argv = f"{program} {words}".split()
    start = commands.next_worker(argv, {}, "/o", "/o/w", "/o/n", "/new")
    assert start is not None
    assert " ".join(start.argv) == f"{program} {expected}"
    told = start.environment.get(paths.MANIFEST_VARIABLE)
    assert told == (None if "--manifest" in words else "/o/n")


@given(st.lists(st.text(min_size=1), max_size=6))
def test_command_lines_of_other_programs_are_never_rewritten(words: list[str]) -> None:
    argv = ["vim", *(word for word in words if "ds4" not in word)]
    assert commands.next_worker(argv, {}, "/", "/w", "/w", "/new") is None


def test_only_variables_that_a_start_depends_on_are_kept() -> None:
    kept = commands.kept_environment({"DS4_API_KEY": "k", "AWS_SECRET": "s", "PATH": "p"})
    assert kept == {"DS4_API_KEY": "k", "PATH": "p"}


def test_a_worker_key_is_found_where_the_worker_finds_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from file\nmore\n")
    assert commands.api_key([], {}, "/") is None
    assert commands.api_key(["--port", "1"], {"DS4_API_KEY": "env"}, "/") == "env"
    assert commands.api_key(["--api-key", "k"], {"DS4_API_KEY": "env"}, "/") == "k"
    assert commands.api_key(["--api-key=@key"], {}, str(tmp_path)) == "from file"
    assert commands.api_key(["--api-key-file", "key"], {}, str(tmp_path)) == "from file"
    by_file = {"DS4_API_KEY_FILE": "key"}
    assert commands.api_key([], by_file, str(tmp_path)) == "from file"
    assert commands.api_key([], {**by_file, "DS4_API_KEY": "env"}, str(tmp_path)) == "env"
    with pytest.raises(UsageError, match="no-such"):
        commands.api_key(["--api-key", "@no-such"], {}, str(tmp_path))


# The journal


def test_a_journal_tells_the_last_run_and_survives_a_cut_last_line(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    with Journal(path) as journal:
        journal.run = "1"
        journal.write("done", "inspect")
        journal.write("end")
        assert journal.unfinished() == []
        journal.run = "2"
        journal.write("plan", model="x")
        journal.write("done", "stop-owner", n=1)
    size = os.path.getsize(path)
    with open(path, "ab") as file:
        file.write(b'{"time":1,"run":"2","kind":"do')
    with Journal(path) as again:
        assert os.path.getsize(path) == size
        assert steps_done(again.unfinished()) == {"stop-owner"}
        assert again.facts("plan") == {"model": "x"}
        assert again.facts("done", "inspect") is None


def test_a_journal_that_is_held_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    with Journal(path), pytest.raises(JournalBusy, match="another replacement"):
        Journal(path)


@pytest.mark.parametrize("text", ["a secret without an end", "line\n", '{"time":1}\n', "{}\nx"])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "j"
    path.write_text(text)
    with pytest.raises(UsageError, match="--log"):
        Journal(str(path))
    assert path.read_text() == text
