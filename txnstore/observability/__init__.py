"""Observability: Prometheus metrics of stores and clients, OpenTelemetry spans, a dashboard; off until asked for."""

from __future__ import annotations
