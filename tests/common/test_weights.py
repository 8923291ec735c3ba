"""Weights for any process: the bytes of the file, by name, without a copy, for as long as shown."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds4_common
from ds4_common import client, tensor_directory, weights
from ds4_common.allocation import Layout, TensorPlace
from ds4_common.errors import (
    IdentityError,
    OwnerUnavailable,
    ProtocolError,
    UnsupportedModel,
    UsageError,
)
from ds4_common.gguf import GgmlType, ValueType
from helpers import stack
from helpers.brokers import broker
from helpers.tiny_gguf import RawTensor, TinyLlama, gguf_bytes, write_llama, write_tensors

T = GgmlType
MIXED = TinyLlama(
    width=256, n_heads=4, ffn=512,
    weights=(T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K,
             T.BF16, T.F16, T.F32, T.IQ2_XXS),
    embedding=T.Q4_K, output=T.Q6_K,
)  # fmt: skip
EXPERTS = {
    "blk.0.ffn_gate_exps.weight": ((1024, 8, 2), T.IQ2_XXS),
    "blk.0.ffn_up_exps.weight": ((1024, 8, 2), T.IQ2_XS),
    "blk.0.ffn_down_exps.weight": ((512, 8, 2), T.Q2_K),
    "blk.0.attn_norm.weight": ((1024,), T.F32),
}
NORM, QUERY = "blk.0.attn_norm.weight", "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "mixed.gguf", MIXED)


@contextmanager
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ds4-w-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def manifest(model: Path) -> Iterator[Path]:
    with short_folder() as run, stack.owner(model, run):
        yield run / "w"


@pytest.fixture
def opened(manifest: Path) -> Iterator[weights.Weights]:
    with weights.attach(manifest) as found:
        yield found


def mapped_regions() -> int:
    """Mappings of owners' memory in this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:")


def readers(manifest: Path) -> int:
    with client.connect(str(manifest), "status") as connection:
        return sum(lease.role == "reader" for lease in connection.status().leases)


def check_against_file(opened: weights.Weights, path: Path) -> None:
    file = gguf.GGUFReader(path)
    assert sorted(opened.names()) == sorted(t.name for t in file.tensors)
    for expected in file.tensors:
        tensor = opened[expected.name]
        assert tensor.dims == tuple(int(d) for d in expected.shape)
        assert bytes(tensor.raw()) == expected.data.tobytes(), tensor
        values = gguf.quants.dequantize(expected.data, expected.tensor_type)
        assert np.array_equal(tensor.numpy(), values.astype(np.float32).reshape(tensor.shape))


# What is read is what is in the file


def test_every_tensor_of_a_packed_model_has_the_bytes_and_values_of_the_file(
    opened: weights.Weights, model: Path
) -> None:
    assert {t.layout for t in opened.values()} == {Layout.RAW, Layout.X8}
    check_against_file(opened, model)


@pytest.mark.parametrize("backend", ["memfd", "shm"])
def test_every_tensor_of_a_model_that_no_recipe_knows_can_be_read(
    tmp_path: Path, backend: str
) -> None:
    path = write_tensors(tmp_path / "m.gguf", EXPERTS, arch="unheard")
    with short_folder() as run, stack.owner(path, run, "--backend", backend):
        with weights.attach(run / "w") as opened:
            layouts = {t.name.split(".")[2]: t.layout.name for t in opened.values()}
            assert layouts == {
                "ffn_gate_exps": "IQ2_XXS_ALIGNED",
                "ffn_up_exps": "IQ2_XS_ALIGNED",
                "ffn_down_exps": "Q2_K_ALIGNED",
                "attn_norm": "RAW",
            }
            check_against_file(opened, path)
            del opened


@pytest.mark.parametrize(
    ("ggml_type", "code"), [(T.F64, "d"), (T.I8, "b"), (T.I16, "h"), (T.I32, "i"), (T.I64, "q")]
)
def test_integers_and_doubles_are_views_and_become_float32(
    tmp_path: Path, ggml_type: GgmlType, code: str
) -> None:
    values = [-3, 0, 5, 7, 11, 13]
    architecture = [("general.architecture", ValueType.STRING, "unheard")]
    tensor = RawTensor("t.weight", (3, 2), ggml_type, struct.pack(f"<6{code}", *values))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(architecture, [tensor]))
    with short_folder() as run, stack.owner(path, run):
        with weights.attach(run / "w") as opened:
            found = opened["t.weight"]
            assert found.array().tolist() == [[-3, 0, 5], [7, 11, 13]]
            assert found.array().dtype == np.dtype(code)
            assert found.rows(1, 2).tolist() == [[7.0, 11.0, 13.0]]
            assert found.numpy().dtype == np.float32


def test_a_type_without_a_dequantizer_is_still_raw_blocks(tmp_path: Path) -> None:
    content = bytes(range(80))  # Q8_1 is a form of activations: no file should hold it
    path = tmp_path / "m.gguf"
    architecture = [("general.architecture", ValueType.STRING, "unheard")]
    path.write_bytes(gguf_bytes(architecture, [RawTensor("t", (32, 2), T.Q8_1, content)]))
    with short_folder() as run, stack.owner(path, run), weights.attach(run / "w") as opened:
        assert bytes(opened["t"].raw()) == content
        with pytest.raises(UnsupportedModel, match="no CPU kernel"):
            opened["t"].numpy()


@pytest.mark.parametrize("name", [QUERY, NORM])
def test_rows_are_those_of_the_whole_tensor(opened: weights.Weights, name: str) -> None:
    tensor = opened[name]
    whole = tensor.numpy().reshape(-1, tensor.dims[0])
    assert np.array_equal(tensor.rows(0, 1), whole[:1])
    assert tensor.rows(1, 1).shape == (0, tensor.dims[0])
    with pytest.raises(ValueError, match="rows"):
        tensor.rows(0, len(whole) + 1)


# Nothing is copied, nothing can be written


def test_float_tensors_are_views_of_the_owners_memory(opened: weights.Weights) -> None:
    tensor = opened[NORM]
    address = tensor.__array_interface__["data"]
    for array in (tensor.array(), np.asarray(tensor), np.from_dlpack(tensor)):
        assert (array.ctypes.data, array.flags.writeable) == (address[0], False)
        assert array.dtype == np.float32
        assert array.shape == tensor.shape
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        tensor.array().setflags(write=True)
    assert tensor.__dlpack_device__() == (1, 0)


def test_raw_blocks_are_a_view_where_the_layout_is_that_of_the_file(
    opened: weights.Weights,
) -> None:
    norm, query = opened[NORM], opened[QUERY]
    assert norm.raw() is norm.memory
    assert query.layout is Layout.X8
    for view in (norm.raw(), norm.memory, query.raw(), query.memory):
        assert view.readonly
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 0


def test_a_consumer_that_cannot_be_told_read_only_gets_no_dlpack_capsule(
    opened: weights.Weights,
) -> None:
    with pytest.raises(BufferError, match="readonly"):
        opened[NORM].__dlpack__()


def test_blocks_are_refused_where_elements_are_needed(opened: weights.Weights) -> None:
    query = opened[QUERY]
    with pytest.raises(TypeError, match=r"Q4_0.*use numpy\(\)"):
        query.array()
    with pytest.raises(BufferError, match=r"Q4_0.*use numpy\(\)"):
        query.__dlpack__(max_version=(1, 0))
    assert not hasattr(query, "__array_interface__")
    with pytest.raises(ValueError, match="by copying only"):
        np.asarray(query, copy=False)


def test_numpy_makes_float32_of_blocks_by_itself(opened: weights.Weights) -> None:
    assert np.array_equal(np.asarray(opened[QUERY]), opened[QUERY].numpy())
    assert np.asarray(opened[QUERY], dtype=np.float64).dtype == np.float64


# Lifetime


def test_a_lease_and_a_mapping_last_as_long_as_somebody_shows_them(manifest: Path) -> None:
    gc.collect()  # what earlier tests left in reference cycles
    before = mapped_regions()
    opened = weights.attach(manifest, name="test")
    assert readers(manifest) == 1
    kept = np.from_dlpack(opened[NORM])[1:]
    expected = opened[NORM].numpy()[1:]
    opened.close()
    gc.collect()
    assert opened.closed
    assert readers(manifest) == 1
    assert np.array_equal(kept, expected)
    assert mapped_regions() > before
    del kept
    gc.collect()
    assert (readers(manifest), mapped_regions()) == (0, before)


def test_weights_that_were_forgotten_end_their_lease(manifest: Path) -> None:
    opened = weights.attach(manifest)
    del opened
    gc.collect()
    assert readers(manifest) == 0


def test_tensors_stay_readable_when_the_owner_is_killed(model: Path) -> None:
    with short_folder() as run, stack.owner(model, run) as owner:
        with weights.attach(run / "w") as opened:
            before = opened[QUERY].numpy()
            owner.stop(signal.SIGKILL)
            assert np.array_equal(opened[QUERY].numpy(), before)
            assert float(opened[NORM].array().sum()) == float(opened[NORM].numpy().sum())


def test_closed_weights_say_so(manifest: Path) -> None:
    with weights.attach(manifest) as opened:
        assert str(len(opened)) in repr(opened)
    assert "closed" in repr(opened)
    assert opened.names() == []
    with pytest.raises(ValueError, match="closed"):
        opened[NORM]


# Refusals


def test_an_unknown_name_is_answered_by_the_nearest_ones(opened: weights.Weights) -> None:
    with pytest.raises(KeyError, match=r"no tensor blk\.0\.attn_q; near: blk\.0\.attn_q\.weight"):
        opened["blk.0.attn_q"]
    assert "blk.0.attn_q" not in opened


def test_each_model_of_an_owner_has_its_own_names(model: Path, tmp_path: Path) -> None:
    draft = write_tensors(tmp_path / "draft.gguf", {"d.weight": ((32, 2), T.F16)})
    with short_folder() as run, stack.owner(model, run, "--drafter", str(draft)):
        with weights.attach(run / "w", model="drafter") as opened:
            assert opened.names() == ["d.weight"]
            assert opened.model.id == "drafter"
        with pytest.raises(UsageError, match="no model 'mtp'; it has base, drafter"):
            weights.attach(run / "w", model="mtp")


def test_a_changed_model_file_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    with short_folder() as run, stack.owner(path, run):
        os.utime(path, ns=(1, 1))
        with pytest.raises(IdentityError, match="modification time"):
            weights.attach(run / "w")


def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(OwnerUnavailable, match="no owner answers"):
        weights.attach(tmp_path / "w")


def test_an_owner_of_an_older_version_is_refused_by_name(tmp_path: Path) -> None:
    with broker(tmp_path) as stage:
        stage.ready()
        with pytest.raises(ProtocolError, match="no tensor directory"):
            weights.attach(tmp_path / "w")


def test_a_place_outside_its_allocation_is_refused() -> None:
    region = (ctypes.c_ubyte * 64)()
    place = TensorPlace("base", "t", T.F32, (8,), Layout.RAW, 0, 40, 32)
    with pytest.raises(ProtocolError, match="32 bytes at 40 of allocation 0, which has 64"):
        weights.Tensor(place, region)


# The directory


def test_a_directory_survives_encoding() -> None:
    places = [TensorPlace("base", "t", T.Q4_K, (256, 8), Layout.X8, 3, 64, 1152)]
    assert tensor_directory.decode(tensor_directory.encode(places)) == places


@given(st.binary(max_size=80) | st.sampled_from([b"{}", b"[]", b"null"]))
def test_arbitrary_bytes_are_no_directory(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        tensor_directory.decode(data)


def test_another_version_and_an_unknown_layout_are_refused() -> None:
    with pytest.raises(ProtocolError, match="version 2"):
        tensor_directory.decode(b'{"version":2,"tensors":[]}')
    document = json.loads(
        tensor_directory.encode([TensorPlace("base", "t", 0, (1,), Layout.RAW, 0, 0, 4)])
    )
    document["tensors"][0]["layout"] = 3
    with pytest.raises(ProtocolError, match="layout"):
        tensor_directory.decode(json.dumps(document).encode())


# Cost


def test_the_package_offers_the_function_by_its_short_name() -> None:
    assert ds4_common.attach is weights.attach
    with pytest.raises(AttributeError, match="no attribute 'detach'"):
        ds4_common.detach  # noqa: B018


def test_importing_the_package_and_the_module_costs_no_numpy() -> None:
    program = (
        "import sys, ds4_common; before = set(sys.modules); "
        "assert not [m for m in before if m.startswith('ds4_common.')]; "
        "import ds4_common.weights; assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
