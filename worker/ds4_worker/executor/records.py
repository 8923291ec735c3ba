"""The native engine's interface as Python sees it: its structs and functions, and a step's records.

Owns: the layouts of native/exec.h and native/sampler.h, packing how a token is to be drawn, and
reading what was drawn; the records are the same for executors on a device. Nothing here lives, and
nothing is refused: who packs has checked.
"""

from __future__ import annotations

import ctypes
import struct

from ds4_common.native import lib
from ds4_worker.executor.api import Sampled, Sampling

TOP_LOGPROBS = 20  # most alternatives per token; native/sampler.h DS4_TOP_LOGPROBS
SLICE_RECORD = struct.Struct("<5i")
DRAW_RECORD = struct.Struct("<fffiQQQii")
ADJUST_RECORD = struct.Struct("<QQIIfff4x")
SAMPLING_BYTES = DRAW_RECORD.size + ADJUST_RECORD.size  # the two, one after the other
_NO_ADJUSTMENTS = bytes(ADJUST_RECORD.size)
DRAWN_RECORD = struct.Struct("<ii")  # how a ds4_sampled begins: token, status
SAMPLED_RECORD = struct.Struct(f"<iifi{TOP_LOGPROBS}i{TOP_LOGPROBS}f")
_SAMPLE_ERRORS = {
    1: "the model's logits are not finite",
    2: "biases and grammar together allow no token",
    3: "a bias, a penalty or a forced token names an id outside the vocabulary",
}


def read_sampled(sampled: memoryview, offset: int, sample: Sampling) -> Sampled:
    """Reads a ds4_sampled."""
    token, status = DRAWN_RECORD.unpack_from(sampled, offset)
    if status:
        return Sampled(token=-1, error=_SAMPLE_ERRORS[status])
    if sample.logprobs < 0:
        return Sampled(token)
    fields = SAMPLED_RECORD.unpack_from(sampled, offset)
    logprob, n_top = fields[2:4]
    ids = fields[4 : 4 + n_top]
    values = fields[4 + TOP_LOGPROBS : 4 + TOP_LOGPROBS + n_top]
    return Sampled(token, logprob, list(zip(ids, values, strict=True)))


def pack_sampling(target: memoryview, offset: int, sample: Sampling) -> None:
    """Writes a ds4_sampling."""
    DRAW_RECORD.pack_into(
        target, offset, sample.temperature, sample.top_p, sample.min_p, sample.top_k,
        sample.seed & 0xFFFFFFFFFFFFFFFF, sample.index, sample.mask,
        min(sample.logprobs, TOP_LOGPROBS), sample.forced,
    )  # fmt: skip
    change, offset = sample.adjust, offset + DRAW_RECORD.size
    if change is None:
        target[offset : offset + ADJUST_RECORD.size] = _NO_ADJUSTMENTS
        return
    ADJUST_RECORD.pack_into(
        target, offset, change.biases, change.seen, change.n_biases,
        change.n_seen, change.repetition, change.frequency, change.presence,
    )  # fmt: skip


class Allocation(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint64), ("data", ctypes.c_void_p), ("n_bytes", ctypes.c_uint64))


class OpenConfig(ctypes.Structure):
    _fields_ = (
        ("image", ctypes.c_void_p),
        ("image_bytes", ctypes.c_uint64),
        ("abi", ctypes.c_uint64),
        ("allocations", ctypes.c_void_p),
        ("n_allocations", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("banks", ctypes.c_uint32),
        ("context_tokens", ctypes.c_uint32),
        ("pages", ctypes.c_uint32),
        ("batch_tokens", ctypes.c_uint32),
        ("batch_outputs", ctypes.c_uint32),
        ("kv_type", ctypes.c_uint32),
        ("isa", ctypes.c_int32),
    )


_INFO_COUNTS = (
    "vocabulary", "page_tokens", "pages_per_bank", "threads", "isa", "sections",
    "struct_bytes", "logits_stride", "forward_only", "histories", "rewinds",
)  # fmt: skip


class Info(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in _INFO_COUNTS)


class History(ctypes.Structure):
    _fields_ = (
        ("window", ctypes.c_uint32),
        ("pages", ctypes.c_uint32),
        ("most", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("page_bytes", ctypes.c_uint64),
    )


def engine_library() -> ctypes.CDLL:
    """The native library with the types of its engine's functions."""
    library = lib.load()
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    library.ds4_engine_open.argtypes = [pointer, pointer, ctypes.c_char_p, ctypes.c_size_t]
    library.ds4_engine_open.restype = ctypes.c_int
    library.ds4_engine_close.argtypes, library.ds4_engine_close.restype = [pointer], None
    library.ds4_engine_info.argtypes, library.ds4_engine_info.restype = [pointer, pointer], None
    library.ds4_engine_history.argtypes = [pointer, u32, pointer]
    library.ds4_engine_history.restype = None
    library.ds4_engine_step.argtypes = [pointer, u32, u32, u32]
    library.ds4_engine_step.restype = ctypes.c_int
    i32 = ctypes.c_int32
    library.ds4_engine_copy_page.argtypes = [pointer, u32, i32, i32, i32]
    library.ds4_engine_copy_page.restype = ctypes.c_int
    for name in ("error", "page_table", "slices", "tokens", "samplings", "sampled", "logits"):
        function = getattr(library, f"ds4_engine_{name}")
        function.argtypes = [pointer]
        function.restype = ctypes.c_char_p if name == "error" else pointer
    library.ds4_engine_allocations.argtypes = [pointer]
    library.ds4_engine_allocations.restype = ctypes.c_uint64
    library.ds4_engine_profile.argtypes = [pointer, ctypes.c_int, pointer, pointer]
    library.ds4_engine_profile.restype = None
    return library
