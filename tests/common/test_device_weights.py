"""Weights on a device for any process: the same tensors, shown by the interfaces of GPU libraries.

The checks run in a process that has the stand-in driver (`python tests/helpers/…` would not find it
otherwise): `PROGRAM` asserts, the test asserts that it ended well.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

import ds4_common
from helpers import cuda_stand_in, stack
from helpers.device_stack import Device, device, every_kind

pytestmark = pytest.mark.skipif(bool(cuda_stand_in.missing()), reason=cuda_stand_in.missing())


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_kind(tmp_path_factory.mktemp("models"))


@pytest.fixture
def run() -> Iterator[Path]:
    """Short enough for socket paths."""
    with tempfile.TemporaryDirectory(prefix="ds4-") as folder:
        yield Path(folder)


@pytest.fixture
def discrete() -> Iterator[Device]:
    with device() as made:
        yield made


def check(on: Device, run: Path, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program, str(run / "w")],
        capture_output=True, text=True, env=stack.process_environment(**on.environment()),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


PREAMBLE = """
import ctypes, gc, sys
import numpy as np
import pytest
import ds4_common
from ds4_common.cuda.reading import DeviceReader
manifest = sys.argv[1]
def fetch(address, n_bytes):
    data = bytearray(n_bytes)
    with DeviceReader() as reader:
        reader.read_into(address, memoryview(data))
    return bytes(data)
"""


def test_every_tensor_gives_the_bytes_of_the_file(discrete: Device, kinds: Path, run: Path) -> None:
    """Aligned layouts are turned back; raw ones are copied."""
    program = discrete.owner(kinds, run)
    reader = discrete.client(run)
    found = reader.ask("attach")
    reader.end()
    assert program.stop() == 0
    assert {entry["layout"] for entry in found.values()} > {"RAW", "IQ2_XXS_ALIGNED"}
    assert {tuple(entry["device"]) for entry in found.values()} == {(2, 0)}
    with stack.owner(kinds, run, "--backend", "memfd", "--cpu-layout", "raw"):
        with ds4_common.attach(run / "w") as model:
            expected = {n: xxhash.xxh3_128_hexdigest(t.raw()) for n, t in model.items()}
    assert {name: entry["raw"] for name, entry in found.items()} == expected


def test_gpu_libraries_are_shown_the_device_memory_read_only(
    discrete: Device, kinds: Path, run: Path
) -> None:
    discrete.owner(kinds, run)
    check(
        discrete,
        run,
        """
with ds4_common.attach(manifest) as model:
    norm = model["blk.0.attn_norm.weight"]
    shown = norm.__cuda_array_interface__
    assert shown["shape"] == (1024,) and shown["typestr"] == "<f4" and shown["version"] == 3
    address, read_only = shown["data"]
    assert read_only
    assert np.array_equal(np.frombuffer(fetch(address, 4096), np.float32), norm.numpy())
    q = model["blk.0.attn_q.weight"]
    with pytest.raises(AttributeError):
        q.__cuda_array_interface__
    blocks = q.device_memory.__cuda_array_interface__
    assert blocks["shape"] == (q.device_memory.nbytes,) and blocks["typestr"] == "|u1"
    assert fetch(blocks["data"][0], 34) == bytes(q.raw()[:34])
    for wrong in (lambda: q.memory, lambda: norm.array(), lambda: q.array()):
        with pytest.raises(TypeError):
            wrong()
""",
    )


def test_values_are_copied_to_the_host_whole_or_by_rows(
    discrete: Device, kinds: Path, run: Path
) -> None:
    discrete.owner(kinds, run)
    check(
        discrete,
        run,
        """
with ds4_common.attach(manifest) as model:
    for name in ("output.weight", "blk.0.attn_q.weight", "blk.0.ffn_down_exps.weight"):
        tensor = model[name]
        values = tensor.numpy()
        assert values.shape == tensor.shape
        flat = values.reshape(-1, tensor.dims[0])
        assert np.array_equal(tensor.rows(3, 7), flat[3:7])
    with pytest.raises(ValueError, match="rows"):
        tensor.rows(5, 4)
    assert np.array_equal(np.asarray(model["output.weight"]), model["output.weight"].numpy())
""",
    )


def test_dlpack_capsules_are_flagged_and_hold_the_memory(
    discrete: Device, kinds: Path, run: Path
) -> None:
    """A consumer as C code is: it takes the capsule over, reads it, and calls the deleter."""
    discrete.owner(kinds, run)
    check(
        discrete,
        run,
        """
from ds4_common import dlpack
model = ds4_common.attach(manifest)
tensor = model["token_embd.weight"]
expected = tensor.numpy()
assert tensor.__dlpack_device__() == (2, 0)
for refused in ({}, {"max_version": (0, 8)}, {"max_version": (1, 0), "copy": True},
                {"max_version": (1, 0), "dl_device": (1, 0)}):
    with pytest.raises(BufferError):
        tensor.__dlpack__(**refused)
with pytest.raises(BufferError, match="no DLPack type"):
    model["blk.0.attn_q.weight"].__dlpack__(max_version=(1, 0))
model["blk.0.attn_q.weight"].device_memory.__dlpack__(max_version=(1, 0))
gc.collect()
assert not dlpack._held  # nobody consumed it
capsule = tensor.__dlpack__(stream=1, max_version=(1, 1))
api = ctypes.pythonapi
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
where = api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
used = ctypes.create_string_buffer(b"used_dltensor_versioned")
api.PyCapsule_SetName(capsule, used)
managed = dlpack._Managed.from_address(where)
assert (managed.major, managed.flags) == (1, 1)
shown = managed.tensor
assert (shown.device.kind, shown.device.number, shown.ndim) == (2, 0, 2)
assert (shown.dtype.code, shown.dtype.bits, shown.dtype.lanes) == (2, 16, 1)
assert [shown.shape[i] for i in range(2)] == [64, 1024]
model.close()
del model, tensor, capsule
gc.collect()
data = fetch(shown.data, 64 * 1024 * 2)  # still mapped: the consumer holds it
assert np.array_equal(np.frombuffer(data, np.float16).reshape(64, 1024), expected)
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(where)
gc.collect()
assert not dlpack._held
assert "sim-device" not in open("/proc/self/maps").read()  # and now nothing is
""",
    )


def test_lease_and_mappings_last_until_the_last_tensor(
    discrete: Device, kinds: Path, run: Path
) -> None:
    discrete.owner(kinds, run)
    check(
        discrete,
        run,
        """
from ds4_common import client
def leases():
    with client.connect(manifest, "status") as connection:
        return [lease.role for lease in connection.status().leases]
model = ds4_common.attach(manifest)
kept = model["blk.0.attn_norm.weight"]
model.close()
gc.collect()
assert leases() == ["reader"]
assert kept.numpy().shape == (1024,)
del kept, model
gc.collect()
while leases():
    pass
assert "sim-device" not in open("/proc/self/maps").read()
""",
    )
