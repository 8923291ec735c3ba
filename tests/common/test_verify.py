"""Is `-m FILE` the model that the owner serves?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ds4_common import verify
from ds4_common.errors import GgufError, IdentityError
from ds4_common.gguf.model import LogicalModel
from ds4_common.identity import ShardStat, fingerprint
from ds4_common.protocol import FileRecord, ModelRecord
from helpers.tiny_gguf import write_llama


@pytest.fixture
def served(tmp_path: Path) -> tuple[Path, ModelRecord]:
    path = tmp_path / "model.gguf"
    write_llama(path)
    s = ShardStat.capture(path)
    with LogicalModel.open(path) as model:
        file = FileRecord(str(path), s.dev, s.inode, s.n_bytes, s.mtime_ns, s.ctime_ns)
        return path, ModelRecord("base", model.n_bytes, fingerprint(model), [file])


def test_the_owners_own_file_is_recognised_without_reading_it(
    served: tuple[Path, ModelRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record = served
    monkeypatch.setattr(LogicalModel, "open", None)
    link = path.with_name("link.gguf")
    link.symlink_to(path)
    assert verify.verify_model([record], str(link)) == verify.VERIFIED


def test_a_copy_is_verified_by_its_content(served: tuple[Path, ModelRecord]) -> None:
    path, record = served
    copy = path.with_name("copy.gguf")
    shutil.copyfile(path, copy)
    assert verify.verify_model([record], str(copy)) == verify.VERIFIED


def test_another_model_of_the_same_size_is_a_mismatch(served: tuple[Path, ModelRecord]) -> None:
    path, record = served
    other = path.with_name("other.gguf")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    with pytest.raises(IdentityError, match="CONTENT IDENTITY MISMATCH for base"):
        verify.verify_model([record], str(other))
    assert "FP_CHECK=0" in verify.verify_model([record], str(other), check=False)


def test_another_size_is_a_mismatch_even_unchecked(served: tuple[Path, ModelRecord]) -> None:
    path, record = served
    longer = path.with_name("longer.gguf")
    longer.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(IdentityError, match="CONTENT IDENTITY MISMATCH for base"):
        verify.verify_model([record], str(longer), check=False)


def test_a_record_without_fingerprint_is_said_to_be_unverified(
    served: tuple[Path, ModelRecord],
) -> None:
    path, record = served
    bare = ModelRecord("base", record.n_bytes, "", [])
    assert verify.verify_model([bare], str(path)) == "carries no content fingerprint"


def test_a_missing_file_or_model_is_named(served: tuple[Path, ModelRecord]) -> None:
    path, record = served
    with pytest.raises(GgufError, match=r"no\.gguf"):
        verify.verify_model([record], str(path.with_name("no.gguf")))
    with pytest.raises(IdentityError, match="holds no mtp model"):
        verify.verify_model([record], str(path), "mtp")
