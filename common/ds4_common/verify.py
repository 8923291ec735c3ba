"""Whether a model file is the one that an owner serves.

Owns: the published identity rules of an importing worker (`-m FILE` beside a manifest). Refuses
other bytes than the ones asked for. The caller reads the environment: DS4_WEIGHT_FP_CHECK.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ds4_common.errors import GgufError, IdentityError
from ds4_common.protocol import FileRecord, ModelRecord

VERIFIED = "content identity verified"


def verify_model(
    models: Sequence[ModelRecord], path: str, model_id: str = "base", *, check: bool = True
) -> str:
    """Compares a local GGUF (first shard of a split one) with what the owner loaded as `model_id`.

    Returns the words for the log: VERIFIED, or why the content was not compared. Raises
    IdentityError for another model, GgufError for a file that cannot be read. The owner's own files
    are recognised by device and inode; others are fingerprinted, which reads 8 MiB and samples."""
    record = next((m for m in models if m.id == model_id), None)
    if record is None:
        held = ", ".join(m.id for m in models) or "none"
        raise IdentityError(
            f"the owner holds no {model_id} model (it holds: {held}), asked: {path}"
        )
    if record.files and _is_same_file(path, record.files[0]):
        return VERIFIED
    from ds4_common.gguf.model import LogicalModel  # only here: workers parse no GGUF otherwise
    from ds4_common.identity import fingerprint

    with LogicalModel.open(path) as model:
        if model.n_bytes != record.n_bytes:
            raise IdentityError(
                f"CONTENT IDENTITY MISMATCH for {model_id}: {path} has {model.n_bytes} bytes, "
                f"the owner's model {record.n_bytes}; serve that file, or restart the owner with "
                "this one"
            )
        if not check:
            return "content not compared: DS4_WEIGHT_FP_CHECK=0"
        if not record.fingerprint:
            return "carries no content fingerprint"
        local = fingerprint(model)
    if local != record.fingerprint:
        raise IdentityError(
            f"CONTENT IDENTITY MISMATCH for {model_id}: {path} has fingerprint {local}, the "
            f"owner's model {record.fingerprint}; serve that file, or restart the owner with this "
            "one"
        )
    return VERIFIED


def _is_same_file(path: str, file: FileRecord) -> bool:
    """The owner compared the files' times at the hello; here it is enough to know them again."""
    try:
        info = os.stat(path)
    except OSError as error:
        raise GgufError(path, 0, "cannot open", error.strerror, "a GGUF file") from error
    now = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
    return now == (file.device, file.inode, file.n_bytes, file.mtime_ns)
