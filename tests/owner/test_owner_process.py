"""Owners as real processes: what they say and serve."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from ds4_common import client, line_client
from ds4_common.gguf import GgmlType
from ds4_common.identity import fingerprint
from ds4_common.manifest import read_manifest
from ds4_owner.resident import resident
from helpers.owner_processes import start
from helpers.stack import Program
from helpers.tiny_gguf import TinyLlama, gguf_bytes, write_llama, write_tensors

IQ2 = {
    "token_embd.weight": ((256, 64), GgmlType.F32),
    "blk.0.ffn_gate_exps.weight": ((1024, 8, 2), GgmlType.IQ2_XXS),
    "blk.0.ffn_down_exps.weight": ((256, 8, 2), GgmlType.Q2_K),
    "blk.0.attn_q.weight": ((1024, 2048), GgmlType.Q8_0),
}


def test_an_owner_says_the_published_lines_in_order(model: Path, run: Path) -> None:
    program = start(model, run, "--cpu-layout", "raw")
    program.wait_for("ready manifest=")
    assert program.stop() == 0
    expected = [
        rf"acquired lock {run}/lock",
        r"base plan model=\d+\.\d\d GiB raw_tensor_ranges=\d+\.\d\d GiB ranges=1",
        r"backend=memfd logical_upload=\d+\.\d\d GiB allocation_plan=\d+\.\d\d GiB",
        r"memory preflight full upload plan need=\S+ GiB reserve=\S+ GiB free=\S+ GiB"
        r" budget=\S+ GiB total=\S+ GiB integrated=1",
        r"content fingerprint base fnv1a-p16m-v1 [0-9a-f]{16}",
        r"base uploaded \d+\.\d\d GiB across 1 ranges",
        rf"broker listening {run}/w\.sock",
        rf"ready manifest={run}/w ranges=1\b.*",
        r"shutting down broker_requests=0",
    ]
    lines = iter(program.lines)
    for pattern in expected:
        assert any(re.fullmatch(f"ds4_weight_server: {pattern}", line) for line in lines), pattern


def test_several_owners_live_beside_each_other_and_end_one_by_one(
    model: Path, run: Path, tmp_path: Path
) -> None:
    more = write_llama(tmp_path / "other.gguf", TinyLlama(seed=2))
    owners = {}
    for name, path in (("one", model), ("two", more)):
        (run / name).mkdir()
        owners[name] = start(path, run / name)
    for program in owners.values():
        program.wait_for("ready manifest=")
    with client.connect(str(run / "one/w")) as one, client.connect(str(run / "two/w")) as two:
        assert one.owner_pid == owners["one"].process.pid
        assert two.owner_pid == owners["two"].process.pid
        assert owners["one"].stop() == 0
        assert two.status().state == "ready"
        assert two.welcome.models[0].files[0].path == str(more)
    assert owners["two"].stop() == 0


@pytest.mark.parametrize("backend", ["memfd", "shm"])
def test_the_line_protocol_hands_out_the_bytes_of_the_file(
    model: Path, run: Path, backend: str
) -> None:
    program = start(model, run, "--cpu-layout", "raw", "--backend", backend)
    program.wait_for("ready manifest=")
    manifest = read_manifest(str(run / "w"))
    data = model.read_bytes()
    assert manifest.broker == str(run / "w.sock")
    for a in manifest.allocations:
        n_bytes, fd = line_client.fetch_allocation(manifest.broker, a.id)
        try:
            assert n_bytes == a.alloc_bytes
            held = os.pread(fd, a.n_bytes, 0)
        finally:
            os.close(fd)
        assert held == data[a.source_offset : a.source_offset + a.source_bytes]
    assert program.stop() == 0
    assert f"broker_requests={len(manifest.allocations)}" in program.text


def test_a_worker_maps_groups_and_blobs_of_a_packed_model(model: Path, run: Path) -> None:
    program = start(model, run)
    program.wait_for("ready manifest=")
    with client.connect(str(run / "w"), role="worker", name="test") as owner:
        (served,) = owner.welcome.models
        assert {blob.name for blob in owner.welcome.blobs} == {
            "contract",
            "image.cpu",
            "tokenizer",
            "frontend",
            "tensors",
        }
        records = owner.describe_allocations()
        groups = [r for r in records if r.artifact is not None and r.artifact.kind == 64]
        mapped = owner.map_allocations([groups[0].id])
        assert len(mapped[groups[0].id].view) == groups[0].n_bytes
    from ds4_common.gguf import LogicalModel

    with LogicalModel.open(model) as opened:
        assert served.fingerprint == fingerprint(opened)
    assert program.stop() == 0


def test_artifacts_replace_raw_experts_and_are_hashed(tmp_path: Path, run: Path) -> None:
    path = write_tensors(tmp_path / "experts.gguf", IQ2)
    program = start(path, run, "--repack-hash", "--repack-q8-aligned", "--cpu-layout", "raw")
    program.wait_for("ready manifest=")
    kinds = [a.artifact and a.artifact.kind for a in read_manifest(str(run / "w")).allocations]
    assert kinds == [None, 6, 4, 5]
    assert program.stop() == 0
    for what in ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_down_exps.weight"):
        assert re.search(rf"repack-hash \S+ {what} bytes=\d+ fnv=[0-9a-f]{{16}}", program.text)
    assert "iq2_xxs aligned repack base: 1 tensors" in program.text
    assert "base excluded 2 repacked tensors from raw ranges" in program.text


def test_a_model_without_a_recipe_is_served_without_a_contract(tmp_path: Path, run: Path) -> None:
    path = write_tensors(tmp_path / "m.gguf", IQ2, arch="unheard")
    program = start(path, run)
    program.wait_for("ready manifest=")
    assert "no contract, serving weights only: " in program.text
    with client.connect(str(run / "w"), role="worker", name="test") as owner:
        assert [b.name for b in owner.welcome.blobs] == ["tensors"]
    assert program.stop() == 0


def test_metadata_that_no_recipe_can_use_costs_the_contract_and_not_the_weights(
    tmp_path: Path, run: Path
) -> None:
    spec = TinyLlama(metadata={"llama.attention.head_count": None})
    program = start(write_llama(tmp_path / "m.gguf", spec), run, "--cpu-layout", "raw")
    program.wait_for("ready manifest=")
    assert "no contract, serving weights only: " in program.text
    assert "'llama.attention.head_count': got no such key" in program.text
    said = [line for line in program.lines if "no contract" in line or "preflight" in line]
    assert len(said) == 2
    assert "no contract" in said[0]  # before anything was allocated or read
    worker = Program.start("ds4_worker.cli", "--manifest", str(run / "w"), "--port", "0")
    assert worker.wait() == 1
    assert "serves weights only" in worker.text
    assert program.stop() == 0


def test_a_model_without_tensors_is_refused_before_loading(tmp_path: Path, run: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(gguf_bytes())
    program = start(path, run)
    assert program.wait() == 1
    assert f"{path}: at byte 0: tensor data: got none" in program.text
    assert os.listdir(run) == ["lock"]


def test_all_three_models_are_served_in_the_published_order(model: Path, run: Path) -> None:
    more = ("--scope", "both", "--mtp", str(model), "--drafter", str(model))
    program = start(model, run, *more)
    program.wait_for("ready manifest=")
    manifest = read_manifest(str(run / "w"))
    order = [(a.model, a.artifact is not None) for a in manifest.allocations]
    assert order == [("base", False), ("mtp", False), ("drafter", False), ("base", True)]
    assert [content.model for content in manifest.contents] == ["base", "mtp", "drafter"]
    assert manifest.owner.scope == "both"
    assert program.stop() == 0


def test_plan_prints_every_allocation_as_text_and_as_json(model: Path) -> None:
    command = [sys.executable, "-m", "ds4_owner.cli", "plan", str(model)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"0 base +at +\d+ +\d+ bytes  raw", text)
    assert "CPU_GROUP cpu-group-0" in text
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert [a["id"] for a in document["allocations"]] == [0, 1]
    assert document["models"][0]["files"][0][0] == str(model)


def test_plan_writes_the_contract_that_loading_would(model: Path, run: Path) -> None:
    command = [sys.executable, "-m", "ds4_owner.cli", "plan", str(model), "--contract"]
    planned = subprocess.run(command, capture_output=True, check=True).stdout
    program = start(model, run)
    program.wait_for("ready manifest=")
    with client.connect(str(run / "w"), role="inspect", name="test") as owner:
        assert bytes(owner.blob("contract").view) == planned
    assert program.stop() == 0


def test_plan_of_an_unknown_family_says_why_there_is_no_contract(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "m.gguf", IQ2, arch="unheard")
    command = [sys.executable, "-m", "ds4_owner.cli", "plan", str(path), "--contract"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "unheard" in done.stderr


def wake_ups(pid: int) -> dict[str, tuple[str, ...]]:
    """By thread: how often it was woken or preempted, and its ticks of the processor."""
    found = {}
    for thread in sorted(os.listdir(f"/proc/{pid}/task")):
        status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
        ticks = (
            Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[11:13]
        )
        switches = [line for line in status.splitlines() if "ctxt_switches" in line]
        found[thread] = (*switches, *ticks)
    return found


def test_an_idle_owner_is_never_woken_and_is_small(model: Path, run: Path) -> None:
    program = start(model, run, "--metrics-port", "0")
    program.wait_for("ready manifest=")
    pid = program.process.pid
    with client.connect(str(run / "w"), "worker", "idle") as worker:
        worker.map_allocations()
        for _ in range(30):  # the loader's end is the last thing that happens by itself
            before = wake_ups(pid)
            select.select([], [], [], 1.0)
            if wake_ups(pid) == before:
                break
        else:
            pytest.fail(f"30 seconds, and none in which nothing woke the owner: {wake_ups(pid)}")
        held = resident(pid)
        assert held["resident"] - held["shared"] < 60e6
    assert program.stop() == 0


def test_the_resident_owner_imports_neither_protobuf_nor_numpy(model: Path, run: Path) -> None:
    program = start(model, run)
    program.wait_for("ready manifest=")
    maps = Path(f"/proc/{program.process.pid}/maps").read_text()
    assert "_upb" not in maps
    assert "numpy" not in maps
    assert program.stop() == 0
