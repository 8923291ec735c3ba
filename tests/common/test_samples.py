"""Samples of memory: the same hash however the bytes stream by, and another one for other bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds4_common import samples


def whole(data: bytes) -> str:
    return samples.digest([data[at : at + size] for at, size in samples.spans(len(data))])


@given(st.integers(0, 200_000), st.lists(st.integers(1, 70_000), max_size=8))
def test_a_stream_in_any_pieces_has_the_samples_of_the_whole(n_bytes: int, cuts: list[int]) -> None:
    data = bytes((7 * i + (i >> 8)) & 255 for i in range(n_bytes))
    sampler = samples.Sampler(n_bytes)
    at = 0
    for cut in [*cuts, n_bytes]:
        sampler.update(memoryview(data)[at : at + cut])
        at = min(n_bytes, at + cut)
    assert sampler.hexdigest() == whole(data)


@given(st.integers(1, 100_000))
def test_the_first_and_the_last_byte_are_always_sampled(n_bytes: int) -> None:
    data = bytearray(n_bytes)
    before = whole(bytes(data))
    for place in (0, n_bytes - 1):
        data[place] = 1
        assert whole(bytes(data)) != before
        data[place] = 0


@given(st.integers(0, 1 << 40))
def test_spans_lie_inside(n_bytes: int) -> None:
    for offset, size in samples.spans(n_bytes):
        assert 0 <= offset <= offset + size <= n_bytes
