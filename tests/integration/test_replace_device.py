"""Models on a device replaced under real owners and `--cuda` workers, with kills at every side.

On the stand-in driver, which counts its memory over all processes: what a killed process leaves on
the device is seen to the byte. The answers are those of the CPU executor on the new model.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4_common import client
from ds4_common.gguf import GgmlType
from ds4_owner.progress import size
from ds4_owner.replace import processes
from ds4_worker.executor.api import ExecutorConfig
from helpers import cuda_stand_in, replacing, stack
from helpers.cuda_executors import kernel_folder
from helpers.device_stack import Device, device
from helpers.executors import GREEDY, cpu_executor, generate
from helpers.prepared import prepare_file
from helpers.replacing import events, killed_replace, replace, served_by, tool
from helpers.stack import Program
from helpers.tiny_gguf import TinyLlama, write_llama, write_tensors

pytestmark = pytest.mark.skipif(bool(cuda_stand_in.missing()), reason=cuda_stand_in.missing())

# Small: the stand-in runs kernels as fibers, and every batch size is captured.
SHAPE = ("--ctx", "64", "--max-seqs", "2", "--prefill-chunk", "8", "--mixed-prefill-quantum", "4")
CONFIG = ExecutorConfig(threads=1, banks=2, context_tokens=64, batch_tokens=8)
PROMPT, COUNT = [3, 14, 15, 92, 65], 4
BODY: dict[str, Any] = {
    "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True,
    "return_token_ids": True,
}  # fmt: skip


class Models:
    """Two of one shape, `a` and `b`; what each answers; and their kernels."""

    def __init__(self, folder: Path) -> None:
        self.paths, self.answers = {}, {}
        for seed, name in enumerate("ab"):
            self.paths[name] = write_llama(folder / f"{name}.gguf", TinyLlama(seed=seed))
            prepared = prepare_file(self.paths[name])
            executor = cpu_executor(prepared, CONFIG)
            drawn = generate(executor, PROMPT, COUNT, GREEDY)
            self.answers[name] = [sampled.token for sampled in drawn]
            executor.close()
        assert self.answers["a"] != self.answers["b"]
        self.kernels = kernel_folder(prepared, CONFIG, folder / "kernels")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def run() -> Iterator[Path]:
    with replacing.folder() as made:
        yield made


@pytest.fixture
def discrete() -> Iterator[Device]:
    with device() as made:
        yield made


def start_worker(on: Device, models: Models, port: int, *flags: str, **more: str) -> Program:
    arguments = ("--cuda", "--port", str(port), *SHAPE, *flags)
    environment = {"DS4_CUDA_KERNELS": str(models.kernels), **on.environment(), **more}
    program = Program.start("ds4_worker.cli", *arguments, **environment)
    on.programs.append(program)
    program.wait_for("ready http")
    return program


def tokens(port: int) -> list[int]:
    status, reply = stack.request(port, "POST", "/v1/completions", BODY)
    assert status == 200, reply
    found: list[int] = reply["choices"][0]["token_ids"]
    return found


def both(on: Device, models: Models, run: Path, port: int) -> tuple[Program, Program]:
    """Owner and worker of model `a`."""
    owner = on.owner(models.paths["a"], run, "--reserve-gb", "0")
    return owner, start_worker(on, models, port, "--manifest", str(run / "w"))


def end_everything(on: Device, run: Path) -> None:
    """What runs at the manifest; then nothing is on the device."""
    pid, _, leases = served_by(run / "w")
    for each in (*leases, pid):
        identity = processes.identify(each)
        assert identity is not None
        assert processes.stop([identity], signal.SIGTERM, stack.DEADLINE_SECONDS) == []
    assert on.used_bytes() == 0


@pytest.mark.parametrize("profile", ["discrete", "integrated"])
def test_a_worker_on_a_device_answers_from_the_new_model_and_can_be_taken_over(
    models: Models, run: Path, profile: str
) -> None:
    port = stack.free_port()
    with device(profile=profile) as on:
        owner, worker = both(on, models, run, port)
        held = on.used_bytes()
        assert tokens(port) == models.answers["a"]
        seen = replace(run, str(models.paths["b"]), "--prompt", "hello", **on.environment())
        assert seen.returncode == 0, seen.stdout
        assert (owner.wait(), worker.wait()) == (0, 0)
        if profile == "discrete":
            assert re.search(r"its .* on GPU-\S+ are free again", seen.stdout), seen.stdout
        pid, model, (worker_pid,) = served_by(run / "w")
        assert model == str(models.paths["b"])
        argv = processes.command_line(pid)
        assert argv[argv.index("--backend") + 1] == "vmm"
        assert "--cuda" in processes.command_line(worker_pid)
        assert tokens(port) == models.answers["b"]
        assert on.used_bytes() == held  # one model of that shape, one worker: nothing of the old
        next_worker = start_worker(on, models, port, "--manifest", str(run / "w"))
        assert (
            processes.stop([p for p in [processes.identify(worker_pid)] if p], signal.SIGCONT, 60.0)
            == []
        )  # the worker before it drains and ends by itself
        assert tokens(port) == models.answers["b"]
        assert served_by(run / "w")[2] == [next_worker.process.pid]
        end_everything(on, run)


def test_a_model_that_would_not_fit_the_device_is_refused_before_anything_is_stopped(
    discrete: Device, models: Models, run: Path
) -> None:
    port = stack.free_port()
    owner, worker = both(discrete, models, run, port)
    environment = discrete.environment()
    seen = replace(run, str(models.paths["b"]), "--reserve-gb", "1000", **environment)
    assert seen.returncode == 1
    assert "nothing was stopped" in seen.stdout
    assert "ds4 sim discrete" in seen.stdout
    looked = tool("preflight", str(models.paths["b"]), "--manifest", str(run / "w"), run=run,
                  **environment)  # fmt: skip
    assert looked.returncode == 0, looked.stdout
    assert "that the old owner gives back" in looked.stdout
    assert served_by(run / "w")[0] == owner.process.pid
    assert worker.process.poll() is None
    assert tokens(port) == models.answers["a"]


def test_a_replacement_that_cannot_ask_the_old_device_stops_nothing(
    discrete: Device, models: Models, run: Path
) -> None:
    owner = discrete.owner(models.paths["a"], run)
    elsewhere = discrete.environment(profile="integrated")  # as with another CUDA_VISIBLE_DEVICES
    seen = replace(run, str(models.paths["b"]), **elsewhere)
    assert seen.returncode == 45, seen.stdout
    assert "not among the devices here" in seen.stdout
    assert served_by(run / "w")[0] == owner.process.pid


def test_a_device_too_full_for_a_context_of_the_replacement_counts_as_full(
    discrete: Device, models: Models, run: Path
) -> None:
    """Weights and caches may take all of it: what the old owner gives back is there for sure."""
    owner = discrete.owner(models.paths["a"], run, "--reserve-gb", "0")
    full = discrete.environment(fault="ds4_owner.cli/cuDevicePrimaryCtxRetain:1:2")
    seen = tool("preflight", str(models.paths["b"]), "--manifest", str(run / "w"), run=run, **full)
    assert seen.returncode == 0, seen.stdout
    held = size(discrete.used_bytes())
    assert f"has {held}: free device memory, with {held} that the old owner" in seen.stdout
    seen = replace(run, str(models.paths["b"]), **full)
    assert seen.returncode == 0, seen.stdout
    assert owner.wait() == 0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 MiB of weights."""
    tensors = {"token_embd.weight": ((1024, 65536), GgmlType.F16)}
    return write_tensors(tmp_path_factory.mktemp("large") / "large.gguf", tensors)


def test_device_memory_that_a_client_still_maps_is_told_and_the_budget_refuses(
    large: Path, run: Path
) -> None:
    """A process with a mapping and no lease: on a device nobody can say that it is the one."""
    with device(total_mb="1224") as on:  # the reserve of a GiB, and one such model
        owner = on.owner(large, run)
        holder = on.client(run)
        assert len(holder.ask("map")) == 1
        holder.ask("leave")
        other = run / "next.gguf"
        other.write_bytes(large.read_bytes())
        seen = replace(run, str(other), "--memory-seconds", "0.3", **on.environment())
        assert seen.returncode == 1
        assert owner.wait() == 0
        assert "128.00 MiB did not come back" in seen.stdout
        assert "the next owner does not fit" in seen.stdout
        assert len(holder.ask("hash")) == 1  # it was left alone
        holder.end()
        assert on.used_bytes() == 0
        resumed = replace(run, "--resume", **on.environment())
        assert resumed.returncode == 0, resumed.stdout
        assert served_by(run / "w")[1] == str(other)


# Of the next owner and its loader. The replacement itself asks only what memory is free.
KILLS = (
    "ds4_owner.loader/cuMemMap:1",
    "ds4_owner.loader/cuMemcpyHtoDAsync:1", "ds4_owner.loader/cuMemcpyDtoHAsync:1",
    "ds4_owner.loader/cuMemUnmap:1", "ds4_owner.cli/cuMemCreate:1",
    "ds4_owner.cli/cuMemExportToShareableHandle:1",
)  # fmt: skip


@pytest.mark.parametrize("call", KILLS)
def test_a_next_owner_or_loader_that_is_killed_leaves_nothing_and_resume_serves_the_model(
    discrete: Device, models: Models, run: Path, call: str
) -> None:
    port = stack.free_port()
    both(discrete, models, run, port)
    broken = discrete.environment(fault=f"{call}:kill")
    seen = replace(run, str(models.paths["b"]), **broken)
    assert seen.returncode == 1, seen.stdout
    assert "the next owner, pid" in seen.stdout
    if "loader" in call:
        assert re.search(r"the loader \(pid \d+\) died while .*: killed by signal 9", seen.stdout)
    assert [e["step"] for e in events(run) if e["kind"] == "refused"] == ["start-owner"]
    assert discrete.used_bytes() == 0
    resumed = replace(run, "--resume", **discrete.environment())
    assert resumed.returncode == 0, resumed.stdout
    assert tokens(port) == models.answers["b"]
    end_everything(discrete, run)


def test_a_next_owner_killed_under_its_first_worker_is_started_again_by_resume(
    discrete: Device, models: Models, run: Path
) -> None:
    port = stack.free_port()
    both(discrete, models, run, port)
    with client.connect(str(run / "w"), "inspect") as owner:
        exported = owner.welcome.allocation_count  # to the loader
    fault = f"ds4_owner.cli/cuMemExportToShareableHandle:{exported + 1}:kill"
    seen = replace(run, str(models.paths["b"]), **discrete.environment(fault=fault))
    assert seen.returncode == 1, seen.stdout
    assert [e["step"] for e in events(run) if e["kind"] == "refused"] == ["start-workers"]
    resumed = replace(run, "--resume", **discrete.environment())
    assert resumed.returncode == 0, resumed.stdout
    assert "is gone: it is started again" in resumed.stdout
    assert tokens(port) == models.answers["b"]
    end_everything(discrete, run)


@pytest.mark.parametrize("step", ["stop-owner", "start-owner", "start-workers", "ask"])
def test_a_replacement_on_a_device_killed_in_a_step_is_finished_by_resume(
    discrete: Device, models: Models, run: Path, step: str
) -> None:
    port = stack.free_port()
    owner, worker = both(discrete, models, run, port)
    held = discrete.used_bytes()
    killed = killed_replace(run, step, models.paths["b"], **discrete.environment())
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    resumed = replace(run, "--resume", **discrete.environment())
    assert resumed.returncode == 0, resumed.stdout
    assert (owner.wait(), worker.wait()) == (0, 0)
    assert len(served_by(run / "w")[2]) == 1, "a worker was started twice"
    assert tokens(port) == models.answers["b"]
    assert discrete.used_bytes() == held
    end_everything(discrete, run)


def test_a_private_owner_on_a_device_is_replaced_under_the_name_that_a_cuda_worker_looks_for(
    discrete: Device, models: Models, run: Path
) -> None:
    port, here = stack.free_port(), {"XDG_RUNTIME_DIR": str(run)}
    flags = ("-m", str(models.paths["a"]))
    worker = start_worker(discrete, models, port, *flags, **here)
    seen = tool("replace", str(models.paths["b"]), *replacing.QUICK, run=run,
                **discrete.environment())  # fmt: skip
    assert seen.returncode == 0, seen.stdout
    assert worker.wait() == 0
    (socket,) = (run / "ds4").glob("*.ctl")
    manifest = socket.with_suffix("")
    pid, model, _ = served_by(manifest)
    assert model == str(models.paths["b"])
    second = start_worker(discrete, models, stack.free_port(), "-m", str(models.paths["b"]), **here)
    assert served_by(manifest)[0] == pid
    assert [path.name for path in (run / "ds4").glob("*.ctl")] == [socket.name]
    assert second.stop() == 0
