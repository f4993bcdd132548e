"""The parts of the CUDA backend that need no GPU: what the probe says, what is cached, what is offered."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from baige_device.backends.cuda import nvrtc, plugin, probe
from baige_device.errors import BackendError
from baige_device.ops import OP_NAMES, contract
from baige_device.registry.manager import load_backend
from baige_device.registry.offers import DeviceInfo, Need
from baige_device.registry.signature import mismatch

H200 = DeviceInfo("cuda", "cuda", "NVIDIA H200", {"compute_capability": (9, 0)})


def test_without_device_nodes_the_chip_is_absent_and_the_reason_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_NODES", ("/nonexistent/nvidia0",))
    assert not plugin.baige_hardware()
    found = plugin.baige_probe()
    assert not found.present
    assert "/nonexistent/nvidia0" in found.reason


def test_every_op_has_an_offer_with_a_module_that_exists() -> None:
    backend = load_backend("cuda")
    assert not backend.broken, backend.traceback
    for op in OP_NAMES:
        offers = backend.offers(op, H200)
        assert offers, op
        for offer in offers:
            assert isinstance(offer.target, str)
            module = offer.target.partition(":")[0]
            assert (Path(plugin.__file__).parents[3] / f"{module.replace('.', '/')}.py").is_file(), offer.target


def test_every_implementation_takes_the_contract_s_arguments() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    backend = load_backend("cuda")
    for op in OP_NAMES:
        for offer in backend.offers(op, H200):
            assert mismatch(contract(op), offer.load()) == "", offer.label


def test_an_old_card_is_refused_with_its_capability() -> None:
    old = DeviceInfo("cuda", "cuda", "old", {"compute_capability": (6, 1)})
    offer = plugin.uva_sparse_gather(old)
    assert not offer.available
    assert "(6, 1)" in offer.available.reason


def test_a_hot_cache_beyond_the_kernel_is_refused() -> None:
    offer = plugin.hot_cache_resolve(H200)
    assert offer.supports(Need("hot_cache_resolve", "test", {"hot_slots": 4096}))
    assert not offer.supports(Need("hot_cache_resolve", "test", {"hot_slots": 1 << 21}))


def test_deep_ep_is_refused_where_its_kernels_do_not_fit() -> None:
    offer = plugin.moe_dispatch(H200)[0]
    fits = {"ranks": 2, "dtype": "bfloat16", "hidden_size": 7168}
    fp8 = {**fits, "dtype": "float8_e4m3fn", "scale_blocks": 56}
    assert offer.supports(Need("moe_dispatch", "test", fits))
    assert offer.supports(Need("moe_dispatch", "test", fp8))
    refused = ({"ranks": 1}, {"ranks": 3}, {"dtype": "float16"}, {"hidden_size": 8}, {"hidden_size": 16384})
    for change in refused:
        assert not offer.supports(Need("moe_dispatch", "test", {**fits, **change})), change
    assert not offer.supports(Need("moe_dispatch", "test", {**fp8, "scale_blocks": 1}))


def test_sources_are_shipped_and_named_by_their_macros() -> None:
    documented = {
        "copy_rows.cu": ("UNIT", "LOADS", "SCATTER"),
        "gather_shards.cu": ("THREADS", "UNROLL"),
        "resolve_cache.cu": ("KEY", "SLOT", "STATE"),
    }
    for name, macros in documented.items():
        text = nvrtc.read_source(name)
        assert all(f"//   {macro}" in text for macro in macros)


def test_a_torn_cache_file_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    nvrtc._write_cached(path, b"a kernel")
    assert nvrtc._read_cached(path) == b"a kernel"
    assert path.read_bytes()[:32] == hashlib.sha256(b"a kernel").digest()
    path.write_bytes(path.read_bytes()[:-1])
    assert nvrtc._read_cached(path) is None
    assert nvrtc._read_cached(tmp_path / "none") is None
    assert os.listdir(tmp_path) == ["kernel.cubin"]


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_without_a_home_directory_kernels_are_compiled_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvrtc._log_once.cache_clear()
    monkeypatch.delenv("BAIGE_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", _homeless)
    monkeypatch.setattr(nvrtc, "find_library", lambda: "/nonexistent/libnvrtc.so")
    monkeypatch.setattr(nvrtc, "_library", lambda path: None)
    monkeypatch.setattr(nvrtc, "_compile", lambda library, name, source, options: b"a kernel")
    for _ in range(2):
        assert nvrtc.compile_source("copy_rows.cu", "sm_90", {}) == b"a kernel"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "compiled kernels are not kept: Could not determine home directory." in line
    assert "set BAIGE_CACHE" in line


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nvrtc._log_once.cache_clear()
    (tmp_path / "file").write_text("")
    for _ in range(2):
        nvrtc._write_cached(tmp_path / "file" / "kernel.cubin", b"a kernel")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_without_a_compiler_library_the_error_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_library", lambda: None)
    assert not nvrtc.available()
    with pytest.raises(BackendError, match=r"copy_rows.cu: no libnvrtc found"):
        nvrtc.compile_source("copy_rows.cu", "sm_90", {})


@pytest.mark.parametrize(
    ("address", "num_bytes", "sms"),
    [
        (1 << 40, 7 << 30, 8),
        (1 << 40, 8 << 30, 5),
        ((2 << 40) + 4096, 8 << 30, 8),
        ((2 << 40) + (64 << 30), 8 << 30, 5),
    ],
)
def test_copies_take_few_blocks_only_where_pages_of_a_large_pool_bound_them(
    address: int, num_bytes: int, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baige_device.backends.cuda import gather, managed_memory

    monkeypatch.setattr(managed_memory, "_live", {2 << 40: 64 << 30})
    by_pages = gather._bound_by_pages(gather._Pool(address, 0, 656, 0), num_bytes)
    assert gather.default_sms(by_pages) == sms
    assert gather._in_one_cluster(sms, by_pages, 0) == by_pages
    assert not gather._in_one_cluster(sms, by_pages, sms)
