"""The makings of collectors, by the package prometheus-client; who lacks it is told of the extra that brings it."""

from __future__ import annotations

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector
except ImportError:
    raise ModuleNotFoundError(
        "metrics need the package prometheus-client: pip install 'txnstore[metrics]'", name="prometheus_client"
    ) from None

__all__ = [
    "Collector",
    "CollectorRegistry",
    "Counter",
    "CounterMetricFamily",
    "Family",
    "Gauge",
    "GaugeMetricFamily",
    "Histogram",
    "HistogramMetricFamily",
    "ProcessCollector",
    "start_http_server",
]
