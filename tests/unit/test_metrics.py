"""Metrics of one process, read as Prometheus reads them."""

from __future__ import annotations

import socket
import urllib.request

import pytest
import torch

import baige_device
from baige_device.errors import SettingsError
from baige_device.metrics import serve
from baige_device.settings import Settings


def test_calls_and_activation_are_served() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    active = baige_device.activate(Settings(backend="reference", metrics_port=port))
    assert serve(active, rank=0) == port
    active.ops.kv_write(torch.ones(1, 1, 2), torch.zeros(1, 1, 1, 2), torch.tensor([0]))
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert 'baige_op_calls_total{backend="reference",op="kv_write",tier="reference"} 1.0' in text
    assert 'baige_op_calls_total{backend="reference",op="merge_attention",tier="reference"} 0.0' in text
    assert f'settings="{active.record.settings_hash}"' in text
    with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"):
        serve(active, rank=0)


def test_off_by_default() -> None:
    assert serve(baige_device.activate(Settings(backend="reference"))) == 0
