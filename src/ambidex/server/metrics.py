"""Prometheus metrics; the unit is the last word of a name, or `total` for counts."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ambidex.core.ids import Fallback
from ambidex.engine.status import EngineStatus

LATENCY_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


class Metrics:
    """The metrics of one server.

    Args:
        state: names and values of gauges of the server itself.
    """

    def __init__(self, state: Callable[[], dict[str, float]]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "ambidex_http_requests", "HTTP requests answered", ("route", "status"), registry=self._registry
        )
        self.request_s = Histogram(
            "ambidex_http_request_seconds", "from the first to the last byte of a request", ("route",),
            buckets=LATENCY_S, registry=self._registry,
        )  # fmt: skip
        self.first_token_s = Histogram(
            "ambidex_time_to_first_token_seconds", "from queueing to the first token, queueing included",
            buckets=LATENCY_S, registry=self._registry,
        )  # fmt: skip
        self.token_gap_s = LoopHistogram("ambidex_time_between_tokens_seconds", "between two tokens of an answer")
        self._registry.register(self.token_gap_s)
        self.prompt_tokens = Counter("ambidex_prompt_tokens", "tokens of prompts taken in", registry=self._registry)
        self.answer_tokens = Counter("ambidex_answer_tokens", "tokens of ended answers", registry=self._registry)
        self.finished = Counter("ambidex_answers", "ended answers", ("reason",), registry=self._registry)
        self._by_request: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._engine = _EngineCollector(state)
        self._registry.register(self._engine)

    def note_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        children = self._by_request.get((route, status))
        if children is None:  # `labels` takes locks and checks its words, each time
            children = self.requests.labels(route, str(status)), self.request_s.labels(route)
            self._by_request[route, status] = children
        children[0].inc()
        children[1].observe(seconds)

    def text(self, status: EngineStatus | None) -> bytes:
        """All metrics in Prometheus' text format.

        Args:
            status: of the engine as it stands; None: there is none, or it says nothing.
        """
        self._engine.status = status
        return generate_latest(self._registry)


class LoopHistogram(Collector):
    """A histogram that the event loop alone fills, once a token: without the lock that is most of what others cost."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(LATENCY_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self._counts[bisect_left(LATENCY_S, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        """The buckets as they stand; each counts all values up to its bound."""
        names = [*map(floatToGoString, LATENCY_S), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum_s)


class _EngineCollector(Collector):
    """The engine's own counters, as they stood when Prometheus asked."""

    def __init__(self, state: Callable[[], dict[str, float]]) -> None:
        self.status: EngineStatus | None = None
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """The metrics as they stand."""
        for name, value in self._state().items():
            yield GaugeMetricFamily(f"ambidex_{name}", name.replace("_", " "), value=value)
        status = self.status
        yield GaugeMetricFamily("ambidex_engine_ready", "the engine answers", value=float(status is not None))
        if status is None:
            return
        stats = status.stats
        yield GaugeMetricFamily("ambidex_requests_waiting", "requests that wait", value=status.num_waiting)
        yield GaugeMetricFamily("ambidex_requests_running", "requests that hold KV blocks", value=status.num_running)
        for name, text, values in (
            ("kv_used_bytes", "KV that requests hold on a tier", stats.kv_bytes),
            ("kv_cached_bytes", "KV that the prefix cache keeps idle on a tier", stats.cached_bytes),
            ("kv_peak_bytes", "the most that they held after a step", stats.peak_kv_bytes),
            ("kv_capacity_bytes", "size of the KV pool of a tier", status.capacity_bytes),
            ("weights_bytes", "weights on a tier", status.weights_bytes),
        ):
            gauge = GaugeMetricFamily(f"ambidex_{name}", text, labels=("tier",))
            for tier, size in values.items():
                gauge.add_metric((tier,), size)
            yield gauge
        yield GaugeMetricFamily("ambidex_session_saved_bytes", "KV of sessions on disk", value=stats.saved_bytes)
        lanes = CounterMetricFamily("ambidex_lane_read_bytes", "KV that a lane's attention has read", labels=("lane",))
        for lane, size in stats.lane_bytes.items():
            lanes.add_metric((lane,), size)
        yield lanes
        sections = CounterMetricFamily("ambidex_step_seconds", "wall time of steps by section", labels=("section",))
        for section, seconds in stats.seconds.items():
            sections.add_metric((section,), seconds)
        yield sections
        fallbacks = CounterMetricFamily(
            "ambidex_fallbacks", "times that the engine took the next path", labels=("kind",)
        )
        for kind in Fallback:
            fallbacks.add_metric((kind,), stats.fallbacks[kind])
        yield fallbacks
        if stats.neurons is not None:
            neurons = stats.neurons
            cache = neurons.cache
            for name, text, count in (
                ("neurons", "neurons of MLPs in DRAM, once a token", neurons.num_neurons),
                ("active_neurons", "those that a token needed", neurons.num_active),
                ("neuron_cache_lookups", "active neurons, once a token", cache.num_active if cache else 0),
                ("neuron_cache_hits", "those that lay on the accelerator", cache.num_hits if cache else 0),
                ("moved_neuron_bytes", "neurons that changed places, both ways", cache.moved_bytes if cache else 0),
                ("failed_neuron_moves", "moves that failed", cache.num_failed_moves if cache else 0),
            ):
                yield CounterMetricFamily(f"ambidex_{name}", text, value=count)
        if stats.hot is not None:
            hot = stats.hot
            yield GaugeMetricFamily(
                "ambidex_hot_blocks", "blocks in DRAM with a copy on the accelerator", value=hot.num_blocks
            )
            for name, text, count in (
                ("promoted_blocks", "copies of hot blocks that arrived on the accelerator", hot.num_promoted),
                ("dropped_copies", "those that were given up", hot.num_dropped),
                ("hot_looks", "steps that counted the keys that bounded attention keeps", hot.num_looks),
                ("looked_kept_keys", "keys of blocks in DRAM that they kept", hot.num_kept),
                ("looked_hot_keys", "those whose block had a copy", hot.num_hits),
            ):
                yield CounterMetricFamily(f"ambidex_{name}", text, value=count)
        for name, text, count in (
            ("steps", "steps of the engine", stats.num_steps),
            ("computed_tokens", "tokens computed, prompts included", stats.num_computed_tokens),
            ("output_tokens", "tokens sampled", stats.num_output_tokens),
            ("cached_tokens", "tokens of prompts that the prefix cache had", stats.num_cached_tokens),
            ("evicted_blocks", "blocks that had to leave the prefix cache", stats.num_evicted_blocks),
            ("restored_tokens", "tokens of prompts that were read from saved sessions", stats.num_restored_tokens),
            ("refused_session_files", "files of saved sessions that were not used", stats.num_refused_files),
            ("failed_session_saves", "blocks of sessions that could not be written", stats.num_failed_saves),
            ("cache_mismatches", "cached blocks with other tokens than their name says", stats.num_cache_mismatches),
            ("preemptions", "requests that yielded their blocks", stats.num_preemptions),
            ("block_moves", "blocks copied between tiers", stats.num_moves),
            ("failed_block_moves", "copies that failed", stats.num_failed_moves),
            ("failed_requests", "requests that failed in a step", stats.num_failed_requests),
            ("verified_blocks", "checksums of blocks that were compared", stats.num_verified_blocks),
            ("corrupt_blocks", "blocks that had changed since they were written", stats.num_corrupt_blocks),
        ):
            yield CounterMetricFamily(f"ambidex_{name}", text, value=count)
