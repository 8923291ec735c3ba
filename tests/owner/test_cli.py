"""Flags, defaults, clamps and exit codes of `ds4-weight-server`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4_common.errors import UsageError
from ds4_owner import cli
from ds4_owner.backends import cuda
from ds4_owner.config import OwnerConfig

BASE = ("--base", "m.gguf", "--scope", "base", "--manifest", "w", "--backend", "memfd")


def parse(*flags: str, **environ: str) -> OwnerConfig:
    return cli.parse([*BASE, *flags], environ)


def test_defaults_are_the_published_ones() -> None:
    config = parse()
    assert config.span_bytes == 1024 << 20
    assert config.copy_chunk_bytes == 256 << 20
    assert config.derive_budget_bytes == 4 << 30
    assert config.derive_group_count == 8
    assert config.lock_file == "/tmp/ds4_weight_server_cuda0.lock"
    assert config.broker_socket == "w.sock"
    assert (config.repack_iq2, config.repack_q2k) == (True, True)
    assert not config.repack_hash
    assert config.exit_on_parent_pid == 0
    assert config.cpu_layout == "auto"
    assert cli.build_parser().parse_args(["--base", "x"]).scope == "both"


@pytest.mark.parametrize(
    ("flag", "value", "field", "expected"),
    [
        ("--span-mb", "1", "span_bytes", 64 << 20),
        ("--span-mb", "99999", "span_bytes", 4096 << 20),
        ("--span-mb", "0", "span_bytes", 1024 << 20),
        ("--span-mb", "many", "span_bytes", 1024 << 20),
        ("--span-mb", "512MB", "span_bytes", 512 << 20),
        ("--span-mb", "-3", "span_bytes", 1024 << 20),
        ("--copy-chunk-mb", "1", "copy_chunk_bytes", 16 << 20),
        ("--copy-chunk-mb", "5000", "copy_chunk_bytes", 1024 << 20),
        ("--copy-chunk-mb", "", "copy_chunk_bytes", 256 << 20),
        ("--reserve-gb", "0", "reserve_bytes", 0),
        ("--reserve-gb", "24", "reserve_bytes", 24 << 30),
        ("--reserve-gb", "x", "reserve_bytes", None),
        ("--derive-budget-gb", "0", "derive_budget_bytes", 0),
        ("--derive-budget-gb", "x", "derive_budget_bytes", 4 << 30),
        ("--device", "3", "lock_file", "/tmp/ds4_weight_server_cuda3.lock"),
        ("--lock-file", "", "lock_file", None),
        ("--lock-file", "l", "lock_file", "l"),
        ("--broker-socket", "b", "broker_socket", "b"),
        ("--exit-on-parent-pid", "77", "exit_on_parent_pid", 77),
        ("--repack-threads", "99", "repack_threads", 16),
        ("--derive-group-count", "16", "derive_group_count", 16),
    ],
)
def test_values_are_read_and_clamped_as_published(
    flag: str, value: str, field: str, expected: object
) -> None:
    assert getattr(parse(flag, value), field) == expected


def test_flags_may_be_repeated_and_keep_their_order() -> None:
    config = parse("--derive-q8-f16", "b", "--derive-q8-f16", "a", "--derive-q8-f32", "c")
    assert (config.derive_q8_f16, config.derive_q8_f32) == (("b", "a"), ("c",))


def test_no_lock_wins_over_a_lock_file() -> None:
    assert parse("--lock-file", "l", "--no-lock").lock_file is None


def test_environment_variables_have_their_published_meaning() -> None:
    config = parse(
        DS4_WS_REPACK_THREADS="3", DS4_WS_REPACK_HASH="1", DS4_CUDA_NO_DIRECT_IO="1",
        DS4_WEIGHT_SERVER_NO_PREFLIGHT="1",
    )  # fmt: skip
    assert config.repack_threads == 3
    assert config.repack_hash
    assert not config.direct_io
    assert not config.preflight
    assert not parse(DS4_WS_REPACK_HASH="yes").repack_hash
    assert parse("--repack-threads", "2", DS4_WS_REPACK_THREADS="3").repack_threads == 2


def test_additive_q8_is_on_for_device_memory_and_on_request_for_host_memory() -> None:
    assert not parse().repack_q8
    assert parse("--repack-q8-aligned").repack_q8
    assert parse("--backend", "vmm").repack_q8
    assert not parse("--backend", "vmm", "--no-repack-q8-aligned").repack_q8


def test_repacks_drop_silently_without_a_base_model_and_are_refused_when_asked_for() -> None:
    mtp = ["--mtp", "m", "--scope", "mtp", "--dry-run", "--backend", "memfd"]
    config = cli.parse(mtp, {})
    assert not any((config.repack_iq2, config.repack_q2k, config.repack_q8))
    for flags in (["--repack-iq2-aligned"], ["--derive-output-certifier"]):
        with pytest.raises(UsageError, match="base scope"):
            cli.parse([*mtp, *flags], {})


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--base", "m", "--manifest", "w"],
        ["--base", "m", "--scope", "base"],
        ["--base", "m", "--scope", "other", "--dry-run"],
        ["--base", "m", "--scope", "base", "--dry-run", "--backend", "tape"],
        ["--base", "m", "--scope", "base", "--dry-run", "--derive-group-count", "0"],
        ["--base", "m", "--scope", "base", "--dry-run", "--derive-group-count", "17"],
        ["--base", "m", "--scope", "base", "--dry", "--manifest", "w"],
        ["--base", "m", "--scope", "base", "--dry-run", "--span-mb"],
        ["--base"],
        ["plan"],
        ["unknown"],
    ],
)
def test_usage_errors_exit_2(flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(flags) == 2
    error = capfd.readouterr().err
    assert error.startswith("ds4_weight_server: ")
    assert "usage: ds4-weight-server" in error


def test_help_exits_0_and_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--base --mtp --drafter --manifest --scope --backend --device --broker-socket --lock-file"
        " --no-lock --exit-on-parent-pid --span-mb --copy-chunk-mb --reserve-gb"
        " --derive-output-certifier --derive-group-count --derive-q8-f16 --derive-q8-f32"
        " --derive-budget-gb --repack-iq2-aligned --no-repack-iq2-aligned --repack-q2k-aligned"
        " --no-repack-q2k-aligned --repack-q8-aligned --no-repack-q8-aligned --repack-threads"
        " --repack-hash --dry-run --help --cpu-layout --served-id"
    ).split():
        assert flag in text


def test_ipc_is_refused_in_one_line_that_points_to_vmm(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--base", "m", "--scope", "base", "--dry-run", "--backend", "ipc"]
    assert cli.main(flags) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ds4_weight_server: backend ipc: ")
    assert "use --backend vmm" in line


def test_the_default_backend_is_vmm_only_where_driver_and_bindings_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--base", "m", "--scope", "base", "--dry-run"]
    for driver, bindings, expected in (
        (False, True, "memfd"), (True, False, "memfd"), (True, True, "vmm"),
    ):  # fmt: skip
        monkeypatch.setattr(cuda, "driver_found", lambda found=driver: found)
        monkeypatch.setattr(cuda, "bindings_found", lambda found=bindings: found)
        assert cli.parse(flags, {}).backend == expected


def test_a_missing_model_file_exits_1_naming_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--scope", "base", "--dry-run", "--backend", "memfd"]
    assert cli.main(["--base", str(tmp_path / "none.gguf"), *flags]) == 1
    assert "none.gguf" in capfd.readouterr().err
