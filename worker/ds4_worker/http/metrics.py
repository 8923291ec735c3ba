"""`GET /metrics`: what happened to requests, sequences and tokens, in Prometheus' text format.

prometheus_client takes longer to import than the whole worker to start, so this module is imported
by the first scrape, in a thread. Everything is read from counters that exist anyway; a scrape is
the only time at which metrics cost anything. Labels are fixed words and status codes: no ids, no
model output, no prompt. A worker that is still loading tells its HTTP side only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ds4_worker.engine.stats import EngineStats, Histogram
from ds4_worker.grammar.kept import GrammarStats
from ds4_worker.http.admission import Admission
from ds4_worker.http.counters import HttpCounters


class Sources(msgspec.Struct, frozen=True):
    """Where the figures are. The engine's appear when the model is ready."""

    counters: HttpCounters
    engine: EngineStats | None = None
    admission: Admission | None = None
    grammars: GrammarStats | None = None  # of those compiled so far, if any
    context_tokens: int = 0  # per sequence


class _Collector(Collector):
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        sources = self._sources
        yield from _requests(sources.counters)
        if sources.admission is not None and sources.engine is not None:
            yield from _sequences(sources.engine, sources.admission)
            yield from _work(sources.engine)
            yield from _capacities(sources.engine, sources.admission, sources.context_tokens)
            yield from _grammars(sources.grammars or GrammarStats())


def _requests(counters: HttpCounters) -> Iterator[Metric]:
    codes = {str(status): count for status, count in counters.responses.items()}
    yield _gauge("ds4_http_connections", "Clients connected", counters.connections)
    yield _counter("ds4_http_requests", "HTTP requests read to their end", counters.requests)
    yield _labelled("ds4_http_responses", "HTTP responses begun", "status", codes)
    yield _labelled(
        "ds4_http_refusals", "Requests that got an error and no answer", "reason", counters.refusals
    )
    yield _counter(
        "ds4_http_disconnects",
        "Clients gone before their answer was complete",
        counters.disconnects,
    )
    yield _counter("ds4_http_keepalives", "Signs of life in silent streams", counters.keepalives)


def _sequences(stats: EngineStats, admission: Admission) -> Iterator[Metric]:
    rejected = {**admission.rejected, "scheduler": stats.rejected}
    yield _counter("ds4_sequences_admitted", "Sequences that got a permit", admission.admitted)
    yield _labelled(
        "ds4_sequences_rejected", "Sequences refused by a full server", "reason", rejected
    )
    yield _counter("ds4_sequences_submitted", "Sequences queued", stats.submitted)
    yield _labelled("ds4_sequences_finished", "Sequences ended", "reason", stats.finished)
    yield _gauge("ds4_sequences_running", "Sequences in a bank", stats.running)
    yield _gauge("ds4_sequences_waiting", "Sequences waiting for a bank or pages", stats.waiting)
    yield _histogram(
        "ds4_queue_seconds", "From queueing to the first work on the prompt", stats.queue_seconds
    )
    yield _histogram(
        "ds4_first_token_seconds", "From queueing to the first token", stats.first_token_seconds
    )
    yield _histogram(
        "ds4_between_tokens_seconds",
        "Between two tokens of a sequence",
        stats.between_tokens_seconds,
    )


def _work(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("ds4_steps", "Executor calls", stats.steps)
    yield _counter(
        "ds4_steps_ahead", "Of these, sent off before the results of the one before",
        stats.steps_ahead,
    )  # fmt: skip
    yield _counter(
        "ds4_rows_discarded", "Rows of steps whose sequences had ended", stats.rows_discarded
    )
    yield _counter("ds4_prompt_tokens", "Prompt tokens processed", stats.prompt_tokens)
    yield _counter("ds4_generated_tokens", "Tokens sampled", stats.generated_tokens)
    yield _counter(
        "ds4_prompt_tokens_reused", "Prompt tokens that needed no work", stats.prompt_tokens_reused
    )
    yield _counter("ds4_prefix_hits", "Prompts that began like an earlier one", stats.prefix_hits)
    yield _counter("ds4_prefix_misses", "Prompts that did not", stats.prefix_misses)
    yield _counter("ds4_kv_pages_evicted", "Cached KV pages given up", stats.pages_evicted)
    yield _counter(
        "ds4_draft_tokens_offered",
        "Guesses of next tokens that steps computed",
        stats.draft_tokens_offered,
    )
    yield _counter(
        "ds4_draft_tokens_accepted", "Guesses that came true", stats.draft_tokens_accepted
    )
    yield _counter(
        "flare_mixed_grammar_decode_steps",
        "Decode steps with constrained and unconstrained sequences",
        stats.mixed_grammar_decode_steps,
    )
    yield _gauge(
        "flare_constrained_max_inflight",
        "Most steps in flight with a constrained sequence",
        stats.constrained_max_inflight,
    )


def _capacities(stats: EngineStats, admission: Admission, context: int) -> Iterator[Metric]:
    yield _gauge("ds4_banks", "Banks in all", stats.banks)
    yield _gauge("ds4_context_tokens", "Most tokens of one sequence", context)
    yield _gauge("ds4_kv_pages", "KV pages in all", stats.pages)
    yield _gauge("ds4_kv_pages_used", "KV pages held by sequences", stats.pages_used)
    yield _gauge("ds4_kv_pages_cached", "KV pages kept for prompts to come", stats.pages_cached)
    yield _gauge("ds4_kv_bytes", "Bytes of all KV pages", stats.kv_bytes)
    yield _gauge("ds4_kv_bytes_used", "Bytes of KV pages held by sequences", stats.kv_bytes_used)
    yield _gauge("ds4_permits", "Sequences admitted at once, at most", admission.total)
    yield _gauge("ds4_permits_free", "Sequences that would be admitted now", admission.free)


def _grammars(stats: GrammarStats) -> Iterator[Metric]:
    yield _counter("ds4_grammars_compiled", "Grammars compiled", stats.compiled)
    yield _counter(
        "ds4_grammars_evicted", "Compiled grammars given up, least recently used first",
        stats.evicted,
    )  # fmt: skip
    yield _gauge("ds4_grammars_kept", "Compiled grammars kept for requests to come", stats.kept)
    yield _gauge(
        "ds4_grammars_heap_bytes", "Growth of the heap since no grammar was kept", stats.heap_bytes
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for word, count in sorted(values.items()):
        family.add_metric([word], count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    buckets, total = [], 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)


def render(sources: Sources) -> bytes:
    """The exposition text."""
    registry = CollectorRegistry()
    registry.register(_Collector(sources))
    return generate_latest(registry)
