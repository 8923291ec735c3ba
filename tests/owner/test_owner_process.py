"""Owners as real processes: what they say, what they leave, and what happens when they are hurt."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4_common import client, protocol
from ds4_common.errors import OwnerUnavailable
from ds4_common.gguf import GgmlType
from ds4_common.identity import fingerprint
from ds4_common.manifest import read_manifest
from ds4_owner.resident import resident
from helpers.stack import DEADLINE_SECONDS, Program, process_environment
from helpers.stuck_owner import STEPS
from helpers.tiny_gguf import TinyLlama, gguf_bytes, write_llama, write_tensors

TESTS = Path(__file__).resolve().parents[1]
IQ2 = {
    "token_embd.weight": ((256, 64), GgmlType.F32),
    "blk.0.ffn_gate_exps.weight": ((1024, 8, 2), GgmlType.IQ2_XXS),
    "blk.0.ffn_down_exps.weight": ((256, 8, 2), GgmlType.Q2_K),
    "blk.0.attn_q.weight": ((1024, 2048), GgmlType.Q8_0),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf")


STARTED: list[Program] = []


@pytest.fixture
def run() -> Iterator[Path]:
    """A folder with a short path, for sockets lie in it. Ends what a failed test left running."""
    with tempfile.TemporaryDirectory(prefix="ds4-") as folder:
        yield Path(folder)
    while STARTED:
        program = STARTED.pop()
        if program.process.poll() is None:
            program.stop(signal.SIGKILL)


def flags(model: Path, run: Path, *more: str) -> list[str]:
    return [
        *("--base", str(model), "--scope", "base", "--backend", "memfd"),
        *("--manifest", str(run / "w"), "--lock-file", str(run / "lock"), *more),
    ]


def start(model: Path, run: Path, *more: str, **environment: str) -> Program:
    return launch("ds4_owner.cli", *flags(model, run, *more), **environment)


def launch(module: str, *arguments: str, **environment: str) -> Program:
    STARTED.append(Program.start(module, *arguments, **environment))
    return STARTED[-1]


def start_helper(*arguments: str) -> Program:
    """helpers.stuck_owner, importable from the test tree."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return launch("helpers.stuck_owner", *arguments, PYTHONPATH=path)


def start_stuck(step: str, model: Path, run: Path, *more: str) -> tuple[Program, int, int]:
    """An owner whose loader waits at `step`; its process, the loader's pid and a pidfd of it."""
    program = start_helper(step, *flags(model, run, *more))
    line = program.wait_for(f"stuck at {step} pid ")
    pid = int(line.rpartition(" ")[2])
    return program, pid, os.pidfd_open(pid)


def wait_gone(pidfd: int) -> None:
    """Until the process behind the pidfd has ended (or is a zombie)."""
    assert select.select([pidfd], [], [], DEADLINE_SECONDS)[0], "the process is still there"
    os.close(pidfd)


def leftovers(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()} - {"lock"}


# What a healthy owner says and serves


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
        n_bytes, fd = client.fetch_allocation(manifest.broker, a.id)
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


# Ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_removes_sockets_and_manifest_and_exits_0(
    model: Path, run: Path, number: int
) -> None:
    program = start(model, run)
    program.wait_for("ready manifest=")
    assert leftovers(run) == {"w", "w.sock", "w.ctl"}
    assert program.stop(number) == 0
    assert leftovers(run) == set()


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_loader_is_reported_and_everything_is_cleaned_up(
    model: Path, run: Path, step: str
) -> None:
    names = set(os.listdir("/dev/shm"))
    program, pid, pidfd = start_stuck(step, model, run, "--backend", "shm")
    os.kill(pid, signal.SIGKILL)
    assert program.wait() == 1
    wait_gone(pidfd)
    doing = "planning" if step in ("start", "plan") else "loading"
    assert f"the loader (pid {pid}) died while {doing}: killed by signal 9 (SIGKILL)" in (
        program.text
    )
    assert leftovers(run) == set()
    assert set(os.listdir("/dev/shm")) <= names


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("step", ["plan", "blobs"])
def test_those_who_wait_for_a_load_hear_at_once_that_it_ended(
    model: Path, run: Path, step: str, number: int
) -> None:
    program, loader, pidfd = start_stuck(step, model, run)
    with client.connect(str(run / "w"), wait_seconds=None) as waiting:
        waiting._send(protocol.WaitReady(DEADLINE_SECONDS))
        with client.connect(str(run / "w"), "status") as operator:
            assert operator.status().state == "loading"
        os.kill(loader if number == signal.SIGKILL else program.process.pid, number)
        if number == signal.SIGKILL:
            reply, _ = waiting._receive()
            assert isinstance(reply, protocol.Welcome)
            assert (reply.state, f"loader (pid {loader}) died" in reply.reason) == ("failed", True)
        else:
            with pytest.raises(OwnerUnavailable):
                waiting._receive()
    assert program.wait() == (1 if number == signal.SIGKILL else 0)
    wait_gone(pidfd)
    assert leftovers(run) == set()


@pytest.mark.parametrize("step", STEPS)
def test_a_stop_during_loading_ends_the_loader_and_leaves_nothing(
    model: Path, run: Path, step: str
) -> None:
    program, _, pidfd = start_stuck(step, model, run)
    assert program.stop() == 0
    wait_gone(pidfd)
    assert "shutting down broker_requests=0" in program.text
    assert leftovers(run) == set()


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_owner_takes_its_loader_along_and_the_next_start_recovers(
    model: Path, run: Path, step: str
) -> None:
    program, _, pidfd = start_stuck(step, model, run)
    assert program.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_gone(pidfd)
    again = start(model, run)
    again.wait_for("ready manifest=")
    assert again.stop() == 0
    assert leftovers(run) == set()


def test_the_manifest_of_a_killed_owner_is_recognised_and_replaced(model: Path, run: Path) -> None:
    program = start(model, run)
    program.wait_for("ready manifest=")
    program.stop(signal.SIGKILL)
    stale = read_manifest(str(run / "w"))
    again = start(model, run)
    again.wait_for("ready manifest=")
    assert "stale manifest" in again.text
    assert read_manifest(str(run / "w")).owner.pid == again.process.pid != stale.owner.pid
    assert again.stop() == 0


def test_an_owner_stops_with_its_parent(model: Path, run: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        program = start(model, run, "--exit-on-parent-pid", str(parent.pid))
        program.wait_for("ready manifest=")
        parent.kill()
        assert program.wait() == 0
        assert f"parent pid {parent.pid} disappeared; shutting down" in program.text
        parent.communicate()
    gone = start(model, run, "--exit-on-parent-pid", str(parent.pid))
    assert gone.wait() == 0
    assert leftovers(run) == set()


def test_a_closed_log_reader_does_not_end_the_owner(model: Path, run: Path) -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "ds4_owner.cli", *flags(model, run)]
    process = subprocess.Popen(command, stderr=writer)
    os.close(writer)
    with open(reader) as lines:
        assert any("ready manifest=" in line for line in lines)
    process.terminate()  # its next line meets a closed pipe
    assert process.wait(DEADLINE_SECONDS) == 0


def test_the_loader_is_what_the_kernel_ends_when_memory_runs_out(model: Path, run: Path) -> None:
    program, loader, pidfd = start_stuck("fill", model, run)
    scores = [
        int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (program.process.pid, loader)
    ]
    assert scores[0] < scores[1] == 800
    assert program.stop() == 0
    wait_gone(pidfd)


# A full disk

FILL_AND_RUN = """
mount -t tmpfs -o size=64k none "$0" || exit 77
"$@" & pid=$!
read line < "$0.stuck"
head -c 100000 /dev/zero > "$0/full" 2>/dev/null
kill -USR1 "${line##* }"
wait $pid; code=$?
rm "$0/full"; echo "left: $(ls -A "$0")" >&2
exit $code
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare(1) to mount a small disk")
def test_a_disk_that_is_full_when_the_manifest_is_written_ends_the_owner_cleanly(
    model: Path, run: Path
) -> None:
    disk = run / "disk"
    disk.mkdir()
    os.mkfifo(f"{disk}.stuck")
    owner = [sys.executable, "-m", "helpers.stuck_owner", "blobs", *flags(model, run)]
    owner[owner.index("--manifest") + 1] = str(disk / "w")
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-Ur"]
    process = subprocess.Popen(
        [*namespace, "sh", "-c", FILL_AND_RUN, str(disk), *owner],
        stderr=subprocess.PIPE, text=True, env=process_environment(),
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if "stuck at blobs pid" in line:
                Path(f"{disk}.stuck").write_text(line)
        code = process.wait(DEADLINE_SECONDS)
    if code == 77 or "unshare" in said:
        pytest.skip(f"cannot mount a small disk here: {said}")
    assert code == 1, said
    assert f"{disk}/w: cannot write the manifest: No space left on device" in said
    assert said.endswith("left: \n")


# Refusals


def test_a_second_owner_of_the_lock_exits_1_naming_the_first(model: Path, run: Path) -> None:
    first = start(model, run)
    first.wait_for("ready manifest=")
    second = launch("ds4_owner.cli", *flags(model, run), "--manifest", str(run / "other"))
    assert second.wait() == 1
    pid = first.process.pid
    assert f"another weight server owns lock {run}/lock pid={pid}" in second.text
    assert first.stop() == 0


def test_a_second_owner_of_the_manifest_exits_1_and_harms_nothing(model: Path, run: Path) -> None:
    first = start(model, run)
    first.wait_for("ready manifest=")
    second = start(model, run, "--no-lock")
    assert second.wait() == 1
    assert str(run / "w") in second.text
    with client.connect(str(run / "w"), role="worker", name="test") as owner:
        assert owner.owner_pid == first.process.pid
    assert first.stop() == 0


@pytest.mark.parametrize(("step", "change"), [("plan", "inode"), ("fill", "modification time")])
def test_a_file_that_changes_between_plan_and_load_is_refused_naming_the_change(
    model: Path, run: Path, tmp_path: Path, step: str, change: str
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    program, pid, pidfd = start_stuck(step, copy, run)
    if step == "plan":
        (tmp_path / "new").write_bytes(model.read_bytes())
        (tmp_path / "new").replace(copy)
    else:
        os.utime(copy, ns=(1, 1))
    os.kill(pid, signal.SIGUSR1)
    assert program.wait() == 1
    wait_gone(pidfd)
    assert re.search(rf"copy\.gguf changed between plan and load: .*{change}", program.text)
    assert leftovers(run) == set()


def test_a_malformed_model_exits_1_naming_file_and_offset(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    program = start(path, run)
    assert program.wait() == 1
    assert re.search(r"bad\.gguf: at byte \d+: ", program.text)
    assert leftovers(run) == set()


def test_too_few_descriptors_are_refused_before_loading(tmp_path: Path, run: Path) -> None:
    tensors: dict[str, tuple[tuple[int, ...], GgmlType]] = {}
    for block in range(9):  # every norm becomes a raw range of its own, the matrices a group
        tensors[f"blk.{block}.attn_norm.weight"] = (256,), GgmlType.F32
        tensors[f"blk.{block}.attn_q.weight"] = (256, 1024), GgmlType.Q4_0
    path = write_tensors(tmp_path / "many.gguf", tensors)
    program = start_helper("--limit", "NOFILE=32", *flags(path, run))
    assert program.wait() == 1
    assert re.search(r"the plan needs \d+ file descriptors .* the limit is 32", program.text)
    assert leftovers(run) == set()


def test_32_descriptors_suffice_for_a_plan_of_few_ranges(model: Path, run: Path) -> None:
    program = start_helper("--limit", "NOFILE=32", *flags(model, run, "--cpu-layout", "raw"))
    program.wait_for("ready manifest=")
    assert program.stop() == 0


@pytest.mark.parametrize("backend", ["memfd", "shm"])
def test_a_limit_on_file_sizes_is_an_error_and_not_a_signal(
    model: Path, run: Path, backend: str
) -> None:
    arguments = flags(model, run, "--cpu-layout", "raw", "--backend", backend)
    program = start_helper("--limit", "FSIZE=65536", *arguments)
    assert program.wait() == 1
    assert "File too large" in program.text
    assert leftovers(run) == set()


def test_a_plan_above_the_memory_is_refused_unless_the_check_is_off(model: Path, run: Path) -> None:
    program = start(model, run, "--reserve-gb", "1000000")
    assert program.wait() == 1
    refusal = "refusing upload; not enough allocatable CUDA memory for full upload plan"
    assert refusal in program.text
    assert leftovers(run) == set()
    for more, environment in (
        (("--reserve-gb", "0"), {}),
        (("--reserve-gb", "1000000"), {"DS4_WEIGHT_SERVER_NO_PREFLIGHT": "1"}),
    ):
        program = start(model, run, *more, **environment)
        program.wait_for("ready manifest=")
        assert program.stop() == 0


def test_a_dry_run_prints_the_budget_and_leaves_nothing(model: Path, run: Path) -> None:
    arguments = ("--base", str(model), "--scope", "base", "--backend", "memfd", "--dry-run")
    program = launch("ds4_owner.cli", *arguments)
    assert program.wait() == 0
    assert program.lines[-1].endswith("dry-run complete; no allocations or manifest were created")
    assert "base CPU groups" in program.text
    assert "acquired lock" not in program.text
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "file", "unwritable", "long", "spaces", "foreign"])
def test_a_manifest_path_that_cannot_work_exits_1_before_loading(
    model: Path, run: Path, kind: str
) -> None:
    (run / "lock-file").write_text("x")
    (run / "lock-foreign").write_text("some file of the user's\n")
    manifest = {
        "missing": run / "none" / "w",
        "file": run / "lock-file" / "w",
        "unwritable": Path("/sys/w"),  # for root too
        "long": run / ("x" * 110),
        "spaces": run / "a b",
        "foreign": run / "lock-foreign",
    }[kind]
    program = launch("ds4_owner.cli", *flags(model, run), "--manifest", str(manifest))
    assert program.wait() == (2 if kind == "foreign" else 1)
    assert str(manifest) in program.text
    assert "content fingerprint" not in program.text
    assert (run / "lock-foreign").read_text() == "some file of the user's\n"


def test_an_unwritable_lock_path_exits_1_naming_the_remedy(model: Path, run: Path) -> None:
    program = start(model, run, "--lock-file", str(run / "none" / "lock"))
    assert program.wait() == 1
    assert "lock open failed" in program.text
    assert "--lock-file" in program.text
