"""Identity that cannot be fooled: what is done to a model file, and who notices, and how."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds4_common import client
from ds4_common.errors import IdentityError, UsageError
from ds4_common.gguf import GgmlType, LogicalModel
from ds4_common.identity import ShardStat
from ds4_common.protocol import ModelRecord
from ds4_owner import recheck, verify
from ds4_owner.answers import Offer, file_record, renewed
from ds4_owner.recheck import Held
from ds4_owner.verify import Report
from helpers.brokers import allocation, memory
from helpers.service_manager import service_manager
from helpers.split import split_gguf
from helpers.stack import Program, owner
from helpers.tiny_gguf import write_tensors


@pytest.fixture
def serving(model: Path, run: Path) -> Iterator[Program]:
    with owner(model, run, "--backend", "memfd") as program:
        yield program


def verified(run: Path) -> Report:
    with client.connect(str(run / "w"), "operator") as operator:
        return verify.verify(operator, str(run / "w"), 0.0)


def found(report: Report) -> str:
    return "\n".join(f"{f.subject} {f.name}: {f.text}" for f in report.findings)


def flip(path: Path, tensor_name: str, within: int = 5) -> int:
    """Changes one byte of a tensor in place; returns its place in the file."""
    with LogicalModel.open(path) as model:
        tensor = model.tensor(tensor_name)
        assert tensor is not None
        offset = tensor.file_offset + within
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    return offset


def refused(run: Path) -> str:
    """What a worker is told."""
    with pytest.raises(IdentityError) as caught:
        client.connect(str(run / "w"), "worker")
    return str(caught.value)


def test_an_unchanged_model_is_verified_whole(serving: Program, model: Path, run: Path) -> None:
    report = verified(run)
    assert report.ok
    assert found(report) == ""
    assert report.compared_bytes > 2 * 100_000
    with client.connect(str(run / "w"), "worker") as worker:
        held = sum(a.n_bytes for a in worker.describe_allocations())
        blobs = sum(b.n_bytes for b in worker.welcome.blobs)
    assert report.compared_bytes == 2 * held + blobs


@pytest.mark.parametrize("layout", ["raw", "packed"])
def test_a_file_rewritten_in_place_is_refused_and_the_tensor_named(
    model: Path, run: Path, layout: str
) -> None:
    with owner(model, run, "--backend", "memfd", "--cpu-layout", layout):
        offset = flip(model, "blk.0.ffn_down.weight")
        assert f"{model}: modification time" in refused(run)
        text = found(verified(run))
        assert f"file {model}: content differs" in text
        assert "tensor blk.0.ffn_down.weight" in text
        if layout == "raw":
            assert f"at byte {offset}" in text


def test_a_restored_modification_time_fools_nobody(
    serving: Program, model: Path, run: Path
) -> None:
    before = os.stat(model)
    flip(model, "output_norm.weight")
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(model).st_mtime_ns == before.st_mtime_ns
    message = refused(run)
    assert "change time" in message
    assert "modification time" not in message
    assert "tensor output_norm.weight" in found(verified(run))


def test_a_file_swapped_for_one_of_equal_size_is_refused_and_named(
    serving: Program, model: Path, run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(model.read_bytes())
    flip(other, "token_embd.weight")
    other.replace(model)
    assert f"{model}: inode" in refused(run)
    report = verified(run)
    text = found(report)
    assert f"file {model}: content differs from what was loaded" in text
    assert f"file {model}: not the file that was loaded: inode" in text
    with client.connect(str(run / "w"), "operator") as operator:
        verify._accept(operator, report)
    assert report.accepted == 0
    refused(run)


def test_an_equal_copy_in_its_place_is_another_file_and_said_to_be_equal(
    serving: Program, model: Path, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "copy").write_bytes(model.read_bytes())
    (tmp_path / "copy").replace(model)
    refused(run)
    report = verified(run)
    assert not report.ok
    assert "no difference in content was found: restart the owner with it" in found(report)


@pytest.mark.parametrize("size", ["data", "header", "empty", "longer", "gone"])
def test_a_truncated_longer_or_missing_file_is_refused_and_named(
    serving: Program, model: Path, run: Path, size: str
) -> None:
    n_bytes = model.stat().st_size
    if size == "gone":
        model.unlink()
    else:
        wanted = {"data": n_bytes - 64, "header": 100, "empty": 0, "longer": n_bytes + 64}
        os.truncate(model, wanted[size])
    message = refused(run)
    report = verified(run)
    assert not report.ok
    if size == "gone":
        assert f"{model}: No such file or directory" in message
        assert f"file {model}: missing: No such file" in found(report)
    else:
        assert f"size in bytes {n_bytes} -> " in message
        assert f"size in bytes {n_bytes} -> " in found(report)


def test_one_replaced_shard_of_three_is_the_one_that_is_named(model: Path, run: Path) -> None:
    shards = split_gguf(model, model.with_name("s"), 3)
    with owner(shards[0], run, "--backend", "memfd", "--cpu-layout", "raw"):
        other = model.with_name("other")
        data = bytearray(shards[1].read_bytes())
        data[-1] ^= 1
        other.write_bytes(data)
        other.replace(shards[1])
        message = refused(run)
        text = found(verified(run))
        for shard, named in zip(shards, (False, True, False), strict=True):
            assert (str(shard) in message) == (str(shard) in text) == named


def test_other_tensors_in_a_file_of_the_same_name_are_named(
    serving: Program, model: Path, run: Path
) -> None:
    data = model.read_bytes()
    assert data.count(b"blk.0.ffn_down.weight") == 1
    model.write_bytes(data.replace(b"blk.0.ffn_down.weight", b"blk.0.ffn_down.weighT"))
    assert "tensor blk.0.ffn_down.weight is gone" in found(verified(run))


def test_changed_metadata_is_noticed_although_no_tensor_changed(
    serving: Program, model: Path, run: Path
) -> None:
    data = bytearray(model.read_bytes())
    value = data.index(b"llama.rope.freq_base") + len("llama.rope.freq_base") + 4
    data[value + 1] ^= 1  # of a float
    model.write_bytes(data)
    refused(run)
    assert "another contract blob than the one that is handed out" in found(verified(run))


def test_metadata_that_no_worker_could_use_any_more_is_named(
    serving: Program, model: Path, run: Path
) -> None:
    data = bytearray(model.read_bytes())
    token = data.index(b"A", data.index(b"tokenizer.ggml.tokens") + 64)
    data[token] = ord("~")  # which is another token already
    model.write_bytes(data)
    assert f"file {model}: cannot be prepared any more: tokenizer" in found(verified(run))


def test_artifacts_are_built_again_and_compared(run: Path, tmp_path: Path) -> None:
    path = write_tensors(
        tmp_path / "iq2.gguf",
        {
            "token_embd.weight": ((256, 64), GgmlType.F32),
            "blk.0.ffn_gate_exps.weight": ((1024, 8, 2), GgmlType.IQ2_XXS),
            "blk.0.ffn_down_exps.weight": ((256, 8, 2), GgmlType.Q2_K),
            "blk.0.attn_q.weight": ((1024, 2048), GgmlType.Q8_0),
        },
    )
    with owner(path, run, "--backend", "memfd", "--repack-q8-aligned"):
        assert verified(run).ok
        flip(path, "blk.0.ffn_down_exps.weight")
        text = found(verified(run))
        assert "tensor blk.0.ffn_down_exps.weight" in text
        assert "ffn_gate_exps" not in text


# A touch


def test_a_touch_is_explained_and_can_be_accepted(
    serving: Program, model: Path, run: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "nice", lambda niceness: 0)
    path = str(run / "w")
    os.utime(model)
    assert "ds4-weight-server verify --accept" in refused(run)
    with pytest.raises(IdentityError, match="touched but hold the bytes that were loaded"):
        verify.main(["--manifest", path, "--rate", "0"])
    assert f"file {model}: touched only, same content: modification time" in capsys.readouterr().out
    refused(run)
    assert verify.main(["--manifest", path, "--rate", "0", "--accept", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["accepted"]) == (True, 1)
    with client.connect(path, "worker") as worker:
        assert worker.welcome.models[0].files[0].mtime_ns == model.stat().st_mtime_ns
    serving.process.send_signal(signal.SIGUSR2)
    serving.wait_for("reexec: took over")
    client.connect(path, "worker").close()
    flip(model, "output_norm.weight")
    refused(run)


def test_what_was_accepted_is_adopted_after_a_kill(model: Path, run: Path) -> None:
    arguments = (
        *("ds4_owner.cli", "--base", str(model), "--scope", "base", "--backend", "memfd"),
        *("--manifest", str(run / "w"), "--lock-file", str(run / "lock")),
    )
    with service_manager(run) as manager:
        program = manager.start(*arguments)
        manager.wait_ready()
        os.utime(model)
        report = verified(run)
        with client.connect(str(run / "w"), "operator") as operator:
            verify._accept(operator, report)
        manager.wait_for(lambda: "ds4.state.2" in manager.names(), "the new record")
        program.stop(signal.SIGKILL)
        program = manager.start(*arguments)
        manager.wait_ready(2)
        program.wait_for("adopted 2 allocations")


def offer_of(path: Path) -> Offer:
    record = ModelRecord("base", 1, "0" * 16, [file_record(str(path), ShardStat.capture(path))])
    return Offer(models=(record,), announced_models=(record,))


@pytest.mark.parametrize("why", ["stranger", "inode", "later", "gone"])
def test_the_owner_accepts_only_files_that_are_what_the_client_read(
    tmp_path: Path, why: str
) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"x")
    offer = offer_of(path)
    other = tmp_path / "other"
    other.write_bytes(b"x")
    read = file_record(str(path), ShardStat.capture(path))
    spoil: dict[str, Callable[[], object]] = {
        "stranger": lambda: None,
        "inode": lambda: other.replace(path),
        "later": lambda: os.utime(path, ns=(1, 1)),
        "gone": path.unlink,
    }
    spoil[why]()
    if why == "stranger":
        read = file_record(str(other), ShardStat.capture(other))
    if why == "inode":
        read = file_record(str(path), ShardStat.capture(path))
    expected = {
        "stranger": (IdentityError, "not a file of this owner"),
        "inode": (IdentityError, "not the file that was loaded"),
        "later": (IdentityError, "changed while it was verified"),
        "gone": (FileNotFoundError, "m"),
    }
    kind, text = expected[why]
    with pytest.raises(kind, match=text):
        renewed(offer, [read])


def test_a_touch_is_renewed_in_the_record(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"x")
    offer = offer_of(path)
    os.utime(path, ns=(1, 1))
    read = file_record(str(path), ShardStat.capture(path))
    again, count = renewed(offer, [read])
    assert count == 1
    assert again.models[0].files == again.announced_models[0].files == [read]


# Memory, and the flags


def test_memory_that_lost_its_hash_is_named_and_says_nothing_about_files() -> None:
    fds = [memory(4096, b"zero"), memory(4096, b"one")]
    read = [recheck.host_memory(fd) for fd in fds]
    good = recheck.hash_memory(read[0], 4096, lambda n: None)
    held = Held(
        {i: (allocation(i, 2, 4096), good, memory) for i, memory in enumerate(read)},
        {"tokenizer": (4096, good, read[0])},
        [],
    )
    findings = list(recheck.check_memory(held, lambda n: None))
    assert [(f.subject, f.name) for f in findings] == [("allocation", "1")]
    assert "base raw range at 4096: memory has hash" in findings[0].text
    assert list(held.without({"1"}).allocations) == [0]
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("rate", ["-1", "inf", "nan"])
def test_a_rate_that_makes_no_sense_is_refused(rate: str) -> None:
    with pytest.raises(UsageError, match="--rate"):
        verify.main(["--rate", rate])
