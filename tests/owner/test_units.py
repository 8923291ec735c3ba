"""The unit files: systemd finds nothing wrong with them, and they keep their promises."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
UNITS = sorted(SYSTEMD.rglob("*.service"))
# Newer than systemd 252, which ignores them.
NEW_KEYS = ("RestartSteps", "RestartMaxDelaySec", "FileDescriptorStorePreserve")
needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze"
)


def service(unit: Path) -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return parser["Service"]


def runnable(unit: Path, folder: Path) -> Path:
    """An instance whose programs exist here."""
    copy = folder / unit.name.replace("@", "@x")
    text = unit.read_text()
    for program in ("/opt/ds4/bin/", "%h/.local/bin/"):
        text = text.replace(program, "/bin/true ")
    copy.write_text(text)
    return copy


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60
    )


@needs_analyze
@pytest.mark.parametrize("kind", ["--system", "--user"])
def test_systemd_analyze_verify_finds_nothing_but_keys_that_are_too_new_for_it(
    tmp_path: Path, kind: str
) -> None:
    folder = SYSTEMD if kind == "--system" else SYSTEMD / "user"
    units = [str(runnable(unit, tmp_path)) for unit in sorted(folder.glob("*.service"))]
    assert len(units) == 2
    done = analyze("verify", "--man=no", kind, *units)
    if "Failed to initialize manager" in done.stderr:
        pytest.skip(done.stderr)
    complaints = [
        line for line in done.stderr.splitlines()
        if str(tmp_path) in line and not any(f"'{key}'" in line for key in NEW_KEYS)
    ]  # fmt: skip
    assert complaints == []
    assert done.returncode == 0


@needs_analyze
@pytest.mark.parametrize("name", ["ds4-weight-server@.service", "ds4-server@.service"])
def test_systemd_analyze_security_finds_little_exposure(tmp_path: Path, name: str) -> None:
    unit = runnable(SYSTEMD / name, tmp_path)
    done = analyze("security", "--offline=yes", "--threshold=25", str(unit))
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze knows no --offline")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: f"{unit.parent.name}/{unit.name}")
def test_no_unit_has_a_start_limit_or_shares_what_must_be_private(unit: Path) -> None:
    assert "\nStartLimitIntervalSec=0\n" in unit.read_text()
    keys = service(unit)
    assert keys["UMask"] == "0077"
    assert keys["KillMode"] == "mixed"
    assert "IPAddressDeny" not in keys
    assert "PrivateDevices" not in keys


def test_owners_keep_their_memory_and_workers_go_first() -> None:
    for folder in (SYSTEMD, SYSTEMD / "user"):
        owner = service(folder / "ds4-weight-server@.service")
        assert owner["Type"] == "notify"
        assert owner["FileDescriptorStorePreserve"] == "yes"
        assert int(owner["FileDescriptorStoreMax"]) >= 1024
        assert owner["RuntimeDirectoryMode"] == "0700"
        assert owner["RuntimeDirectoryPreserve"] == "yes"
        worker = service(folder / "ds4-server@.service")
        assert worker["Restart"] == "always"
        assert int(worker["OOMScoreAdjust"]) > int(owner.get("OOMScoreAdjust", "0"))
        text = (folder / "ds4-server@.service").read_text()
        assert "\nRequires=" not in text
        assert "\nBindsTo=" not in text


def test_the_sockets_are_excluded_from_cleaning() -> None:
    rules = (SYSTEMD / "ds4.tmpfiles.conf").read_text().splitlines()
    assert "x /run/ds4/*" in rules
    assert "x /tmp/ds4-*" in rules
