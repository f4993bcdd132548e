"""Prometheus metrics of one process: what is active, how often each op was called, what fell back.

prometheus-client is an extra (`pip install 'baige-device[metrics]'`; both engines bring it).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from baige_device.activation import Activation
from baige_device.errors import SettingsError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["ActivationCollector", "Source", "add_source", "remove_source", "serve"]

logger = logging.getLogger("baige_device")


class Source(Protocol):
    """Anything with metrics of its own, such as an optimisation. `collect` runs on the server's thread."""

    def collect(self) -> Iterable[Metric]: ...


_sources: list[Source] = []


def add_source(source: Source) -> None:
    """Serve the metrics of `source` as well, from now on; it costs nothing while no port is served."""
    _sources.append(source)


def remove_source(source: Source) -> None:
    """Undo `add_source`; one that was not added is no error."""
    if source in _sources:
        _sources.remove(source)


class _Added:
    """All added sources as one collector, so that they may come and go while metrics are served."""

    def collect(self) -> Iterable[Metric]:
        for source in tuple(_sources):
            yield from source.collect()


class ActivationCollector:
    """A prometheus-client collector over one activation; reading it costs the hot path nothing."""

    def __init__(self, activation: Activation) -> None:
        self._activation = activation

    def collect(self) -> Iterable[Metric]:
        """Yield `baige_activation_info`, `baige_op_calls_total` and `baige_op_fallback_info`."""
        from prometheus_client.core import CounterMetricFamily, InfoMetricFamily

        record = self._activation.record
        yield InfoMetricFamily(
            "baige_activation",
            "What this process runs with",
            value={
                "backend": record.backend,
                "device": record.device,
                "engine": record.engine,
                "settings": record.settings_hash,
                "version": record.versions["baige-device"],
            },
        )
        calls = CounterMetricFamily(
            "baige_op_calls", "Python calls of each op (graph replays make none)", labels=["op", "backend", "tier"]
        )
        for op, count in self._activation.ops.calls().items():
            calls.add_metric([op, record.ops[op].backend, record.ops[op].tier], count)
        yield calls
        fallbacks = InfoMetricFamily("baige_op_fallback", "Ops on the reference backend", labels=["op"])
        for op in record.fallbacks:
            fallbacks.add_metric([op], {"reason": record.ops[op].reason})
        yield fallbacks


def serve(activation: Activation, rank: int = 0) -> int:
    """Serve `/metrics` of this process on `127.0.0.1:(metrics_port + rank)`; returns the port, 0 when it is off.

    Raises:
        SettingsError: prometheus-client is missing, or the port is taken.
    """
    if not activation.settings.metrics_port:
        return 0
    port = activation.settings.metrics_port + rank
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise SettingsError(
            "metrics_port: prometheus-client is not installed; pip install 'baige-device[metrics]'"
        ) from error
    registry = CollectorRegistry()
    registry.register(ActivationCollector(activation))
    registry.register(_Added())
    try:
        start_http_server(port, addr="127.0.0.1", registry=registry)
    except (OSError, OverflowError) as error:
        raise SettingsError(f"metrics_port: cannot listen on 127.0.0.1:{port}: {error}") from error
    logger.info("metrics of rank %d on http://127.0.0.1:%d/metrics", rank, port)
    return port
