"""The native sampler over rows of logits that lie in host memory, one row after the other.

Owns: its records and its scratch. The draws are those of the CPU executor to the bit, because the
code is the same (native/sampler.h). Allocates nothing after it was made.
"""

from __future__ import annotations

import ctypes

from ds4_common.native import lib
from ds4_common.quants.native import best_isa
from ds4_worker.executor.api import Sampled, Sampling
from ds4_worker.executor.cpu import (
    SAMPLED_RECORD,
    SAMPLING_BYTES,
    pack_sampling,
    read_sampled,
)

_SCRATCH_BYTES = 12  # per token of the vocabulary; native/sampler.h DS4_SAMPLE_SCRATCH


class HostSampler:
    def __init__(self, vocabulary: int) -> None:
        library = lib.load()
        library.ds4_vector_table.restype = ctypes.c_void_p
        library.ds4_vector_table.argtypes = [ctypes.c_int]
        library.ds4_sample.restype = None
        library.ds4_sample.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_void_p,
        ]  # fmt: skip
        self._sample = library.ds4_sample
        self._table = library.ds4_vector_table(int(best_isa()))
        self._vocabulary = vocabulary
        self._how = ctypes.create_string_buffer(SAMPLING_BYTES)
        self._sampled = ctypes.create_string_buffer(SAMPLED_RECORD.size)
        self._scratch = ctypes.create_string_buffer(_SCRATCH_BYTES * vocabulary)
        self._how_view = memoryview(self._how).cast("B")
        self._sampled_view = memoryview(self._sampled).cast("B")

    def draw(self, logits_address: int, how: Sampling) -> Sampled:
        """One token from the row at that address."""
        pack_sampling(self._how_view, 0, how)
        self._sample(
            self._table, logits_address, self._vocabulary, self._how, self._scratch, self._sampled
        )
        return read_sampled(self._sampled_view, 0, how)
