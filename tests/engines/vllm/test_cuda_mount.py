"""What the CUDA mount does around its kernels, on CPU with the reference ops: shapes, rows, and who is left alone."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baige_device.activation import current
from baige_device.settings import Settings
from tests.engines.vllm.engine import run

pytestmark = pytest.mark.usefixtures("reference")

HEADS, TOKENS, TOPK, PAGES = 4, 3, 64, 5


def features(**changes: Any) -> Any:
    from baige_device.engines.vllm.cuda_features import CudaFeatures

    off = {"swap": False, "mirror": False, "pool": False, "index": False, "overlap": False}
    return CudaFeatures(**{"ops": current().ops, "attention": True, "pid": os.getpid(), **off, **changes})


def impl(**changes: Any) -> Any:
    """A layer's implementation without the engine around it."""
    from baige_device.engines.vllm.cuda_attention import FlashMlaImpl

    made: Any = object.__new__(FlashMlaImpl)
    made._features = features(**changes)
    made._attends, made.kv_cache_dtype, made.softmax_scale = True, "fp8_ds_mla", 576**-0.5
    return made


def fp8_rows(pages: int) -> torch.Tensor:
    """uint8 `[P, 64, 656]` of small finite values."""
    rows = torch.zeros(pages, 64, 656, dtype=torch.uint8)
    latent = torch.randn(pages, 64, 512).clamp(-3, 3).to(torch.float8_e4m3fn)
    rows[..., :512] = latent.view(torch.uint8)
    rows[..., 512:528] = (torch.rand(pages, 64, 4) + 0.5).view(torch.uint8)
    rows[..., 528:] = torch.randn(pages, 64, 64).to(torch.bfloat16).view(torch.uint8)
    return rows


def plain(rows: torch.Tensor) -> torch.Tensor:
    """The values of fp8 rows, float64 `[S, 576]`."""
    flat = rows.reshape(-1, 656)
    scales = flat[:, 512:528].contiguous().view(torch.float32).double().repeat_interleave(128, 1)
    latent = flat[:, :512].contiguous().view(torch.float8_e4m3fn).double() * scales
    return torch.cat((latent, flat[:, 528:].contiguous().view(torch.bfloat16).double()), 1)


def expected(q: torch.Tensor, values: torch.Tensor, lists: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention `[T, H, 512]` in float64, list by list."""
    out = []
    for query, chosen in zip(q.double(), lists.long(), strict=True):
        keys = values[chosen[chosen >= 0]]
        out.append(torch.softmax(query @ keys.T * scale, -1) @ keys[:, :512])
    return torch.stack(out)


def test_fp8_decode_keeps_the_hosts_shapes() -> None:
    torch.manual_seed(0)
    rows, made = fp8_rows(PAGES), impl()
    q = torch.randn(TOKENS, 1, HEADS, 576).to(torch.bfloat16)
    lists = torch.stack([torch.randperm(PAGES * 64)[:TOPK] for _ in range(TOKENS)]).int()
    lists[0, 40:] = -1
    out, lse = made._fp8_flash_mla_kernel(q, rows, lists.unsqueeze(1), None)
    assert out.shape == (TOKENS, 1, HEADS, 512)
    assert lse.shape == (TOKENS, HEADS, 1)
    want = expected(q[:, 0], plain(rows), lists, made.softmax_scale)
    torch.testing.assert_close(out[:, 0].double(), want, atol=2e-2, rtol=2e-2)


def test_bf16_prefill_writes_the_hosts_buffer() -> None:
    torch.manual_seed(1)
    made = impl()
    rows = torch.randn(PAGES * 64, 576).to(torch.bfloat16)
    q = torch.randn(TOKENS, HEADS, 576).to(torch.bfloat16)
    lists = torch.stack([torch.randperm(len(rows))[:TOPK] for _ in range(TOKENS)]).int()
    buffer = torch.full((TOKENS, HEADS, 512), torch.nan, dtype=torch.bfloat16)
    out, _ = made._bf16_flash_mla_kernel(q, rows, lists, None, None, buffer)
    assert out.data_ptr() == buffer.data_ptr()
    want = expected(q, rows.double(), lists, made.softmax_scale)
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)


def test_overlap_attends_hits_then_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup

    from baige_device.engines.vllm import cuda_attention

    torch.manual_seed(2)
    rows, made = fp8_rows(PAGES), impl(overlap=True)
    lists = torch.randperm(PAGES * 64)[: TOKENS * TOPK].view(TOKENS, TOPK).int()
    late = torch.rand(TOKENS, TOPK) < 0.3
    late[0], late[1] = False, True  # no misses, no hits
    absent = rows.clone().view(-1, 656)
    absent[lists[late].long()] = 0xFF  # NaN until the copy has landed
    pool = absent.view_as(rows)

    def swap(cache: Any, topk: torch.Tensor, metadata: Any) -> Any:
        def land() -> None:
            pool.copy_(rows)

        compact = torch.full_like(lists, -1)
        for row, missed in enumerate(late):
            compact[row, : int(missed.sum())] = lists[row][missed]
        return SimpleNamespace(
            hit_rows=torch.where(late, -1, lists), late_rows=compact, late_counts=late.sum(1).int(), join=land
        )

    group: Any = object.__new__(HiSparseMLAIndexGroup)
    group.caches = [SimpleNamespace(decode_batch=True, runtime=SimpleNamespace(max_swap_rows=TOKENS))]
    group.caches[0].runtime.hot = SimpleNamespace(attention_cache=pool)
    made.index_group, made.index_group_index = group, 0
    monkeypatch.setattr(cuda_attention, "split_swap", swap)
    q = torch.randn(TOKENS, HEADS, 576).to(torch.bfloat16)
    out = made._host_backed_fp8_decode(q, lists, None, None, TOKENS)
    want = expected(q, plain(rows), lists, made.softmax_scale)
    torch.testing.assert_close(out.double(), want, atol=3e-2, rtol=3e-2)


def test_a_swapped_decode_attends_the_rows_that_the_swap_names() -> None:
    from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup

    torch.manual_seed(5)
    rows, made = fp8_rows(PAGES), impl(swap=True)
    lists = torch.stack([torch.randperm(PAGES * 64)[:TOPK] for _ in range(TOKENS)]).int()
    lists[1, 20:] = -1
    positions = torch.randint(0, 9999, lists.shape, dtype=torch.int32)

    class Group(HiSparseMLAIndexGroup):  # type: ignore[misc]
        def convert_logical_to_physical_topk(self, layer: int, topk: torch.Tensor, batch: Any, **options: Any) -> Any:
            assert (layer, topk is positions, batch) == (0, True, "batch")
            assert options == {"block_stride_rows": None, "return_valid_counts": False}
            return lists

    group: Any = object.__new__(Group)
    group.caches = [SimpleNamespace(decode_batch=True, runtime=SimpleNamespace(max_swap_rows=TOKENS))]
    group.caches[0].runtime.hot = SimpleNamespace(attention_cache=rows)
    made.index_group, made.index_group_index = group, 0
    q = torch.randn(TOKENS, HEADS, 576).to(torch.bfloat16)
    out = made._host_backed_fp8_decode(q, positions, "batch", None, TOKENS)
    assert out.shape == (TOKENS, HEADS, 512)
    want = expected(q, plain(rows), lists, made.softmax_scale)
    torch.testing.assert_close(out.double(), want, atol=3e-2, rtol=3e-2)


class Worker:
    """The part of the host's connector worker that the mirror touches."""

    def __init__(self, layers: int = 2) -> None:
        self.cache_handles = [
            SimpleNamespace(
                decode_batch=True,
                host_mirror_required=True,
                num_actual_tokens=4,
                slot_mapping=torch.tensor([5, 64, -1, 130, 7]),
                mirror_slot_mapping=torch.tensor([9, 3, -1, 70, 8]),
                view=SimpleNamespace(cache=torch.randn(3, 80, 16)[:, :64]),
                runtime=SimpleNamespace(host_cache=torch.full((128, 16), torch.nan)),
            )
            for _ in range(layers)
        ]
        self.is_host_writer, self.shared_host_region = True, None
        self._draft_layers: tuple[int, ...] = ()
        self._per_layer_mirrored: set[int] = set()
        self._slot_mapping_staging = SimpleNamespace(num_tokens=0)
        self.cleared = 0

    def _clear_forward_mirror_state(self) -> None:
        self.cleared += 1


def test_decoded_rows_reach_the_host_and_nothing_else() -> None:
    from baige_device.engines.vllm import cuda_mirror

    staged: list[int] = []
    worker: Any = Worker()
    cuda_mirror._stage_later(lambda self, tokens: staged.append(tokens))(worker, 4)
    cuda_mirror._prepare(lambda self, metadata: None)(worker, {})
    cuda_mirror._finish(current().ops, pytest.fail)(worker, None)
    assert staged == []
    assert worker.cleared == 1
    for handle in worker.cache_handles:
        host = handle.runtime.host_cache
        for source, target in ((5, 9), (64, 3), (130, 70)):
            assert torch.equal(host[target], handle.view.cache[source // 64, source % 64])
        assert host.isnan().all(1).sum() == len(host) - 3


def test_a_slot_mapping_read_back_in_vain_does_not_pile_up() -> None:
    """Without CUDA graphs only the layers learn that a step is a decode step, after the mapping was read back."""
    from baige_device.engines.vllm import cuda_mirror

    def stage(worker: Any, tokens: int) -> None:
        worker._slot_mapping_staging.num_tokens += tokens

    worker: Any = Worker()
    for _ in range(3):
        for handle in worker.cache_handles:
            handle.decode_batch = False
        cuda_mirror._stage_later(stage)(worker, 4)
        cuda_mirror._prepare(lambda self, metadata: None)(worker, None)
        assert worker._slot_mapping_staging.num_tokens == 4
        for handle in worker.cache_handles:
            handle.decode_batch = True
        cuda_mirror._finish(current().ops, pytest.fail)(worker, None)
        assert worker._slot_mapping_staging.num_tokens == 0


def test_rows_of_a_step_that_is_the_hosts_after_all_are_staged() -> None:
    from baige_device.engines.vllm import cuda_mirror

    calls: list[object] = []
    worker: Any = Worker()
    cuda_mirror._stage_later(lambda self, tokens: calls.append(tokens))(worker, 4)
    cuda_mirror._prepare(lambda self, metadata: None)(worker, {})
    assert calls == []
    worker.cache_handles[0].decode_batch = False
    cuda_mirror._finish(current().ops, lambda self, event: calls.append("host"))(worker, None)
    assert calls == [4, "host"]


@pytest.mark.parametrize(
    "change",
    [
        {"_draft_layers": (1,)},
        {"shared_host_region": object()},
        {"is_host_writer": False},
        {"_per_layer_mirrored": {0}},
    ],
)
def test_other_steps_stay_the_hosts(change: dict[str, Any]) -> None:
    from baige_device.engines.vllm import cuda_mirror

    calls: list[object] = []
    worker: Any = Worker()
    for name, value in change.items():
        setattr(worker, name, value)
    cuda_mirror._stage_later(lambda self, tokens: calls.append(tokens))(worker, 4)
    cuda_mirror._prepare(lambda self, metadata: calls.append("prepared"))(worker, {})
    cuda_mirror._finish(current().ops, lambda self, event: calls.append(event))(worker, "ready")
    assert calls == ["prepared", 4, "ready"]
    assert all(handle.runtime.host_cache.isnan().all() for handle in worker.cache_handles)


def test_the_index_cache_is_keys_and_then_scales() -> None:
    from baige_device.engines.vllm.cuda_indexer import index_views

    keys = torch.randn(2, 64, 128).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 64)
    pool = torch.zeros(2, 64 * 132 + 256, dtype=torch.uint8)  # pages of other layers between
    pool[:, : 64 * 128] = keys.view(torch.uint8).flatten(1)
    pool[:, 64 * 128 : 64 * 132] = scales.view(torch.uint8)
    cache = pool[:, : 64 * 132].unflatten(1, (64, 132))
    seen_keys, seen_scales = index_views(cache, 128)
    assert torch.equal(seen_keys.view(torch.uint8), keys.view(torch.uint8))
    assert torch.equal(seen_scales, scales)


def test_on_an_nvidia_platform_the_backend_is_ours_and_off_leaves_it() -> None:
    answer = run("cuda_platform", BAIGE_BACKEND="cuda").answer
    assert answer["class"] == "baige_device.engines.vllm.cuda_attention.FlashMlaBackend"
    assert answer["name"] == "FLASHMLA_SPARSE"
    answer = run("cuda_platform", BAIGE_BACKEND="off").answer
    assert answer["class"] == "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"


def test_settings_that_vllms_own_options_overrule_are_named(caplog: pytest.LogCaptureFixture) -> None:
    from baige_device.engines.vllm.cuda_features import check_hisparse_settings
    from baige_device.errors import MountError

    def config(hisparse: bool, connector: str | None, **extra: str) -> Any:
        transfer = connector and SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
        native = SimpleNamespace(hisparse_config=object() if hisparse else None)
        return SimpleNamespace(attention_config=native, kv_transfer_config=transfer)

    on = Settings.model_validate({"hisparse": {"host_gib_per_node": 1.5, "hot_tokens": 4096}})
    with pytest.raises(MountError, match=r"host_gib_per_node = 1\.5: expected no --kv-transfer-config.*got NixlConnec"):
        check_hisparse_settings(on, config(False, "NixlConnector"))
    assert check_hisparse_settings(Settings(), config(True, "HiSparseConnector"))
    assert not check_hisparse_settings(Settings(), config(False, "NixlConnector"))
    assert check_hisparse_settings(on, config(True, "HiSparseConnector", given_by="baige_device"))
    assert not caplog.text
    assert check_hisparse_settings(on, config(True, "HiSparseConnector"))
    assert "hisparse.host_gib_per_node and hisparse.hot_tokens: no effect" in caplog.text


def start(**changes: Any) -> Any:
    """The parts of a vLLM configuration that our HiSparse setting looks at."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    parallel = {"local_world_size": 1, "data_parallel_size_local": 1, "data_parallel_size": 1}
    parallel |= {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1}
    setting = {"host_gib_per_node": 96, "hot_tokens": changes.pop("hot_tokens", 6144)}
    text = SimpleNamespace(index_topk=2048)
    model = SimpleNamespace(model="m", hf_config=text, hf_text_config=text)
    backend = AttentionBackendEnum[changes.pop("backend")] if "backend" in changes else None
    return SimpleNamespace(
        additional_config={"baige": {"hisparse": setting}},
        attention_config=SimpleNamespace(hisparse_config=None, backend=backend),
        kv_transfer_config=None,
        cache_config=SimpleNamespace(kv_offloading_size=changes.pop("kv_offloading_size", None)),
        model_config=changes.pop("model_config", model),
        speculative_config=None,
        parallel_config=SimpleNamespace(**{**parallel, **changes}),
    )


@pytest.mark.parametrize(
    ("ranks", "replicas", "shared", "size_gib"),
    [(1, 1, False, 96), (8, 1, True, 96), (8, 1, False, 12), (2, 4, True, 24), (2, 0, True, 48)],
)
def test_one_setting_is_shared_out_over_the_pools_of_a_node(
    ranks: int, replicas: int, shared: bool, size_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.hisparse import runtime

    from baige_device.engines.vllm.cuda_options import give_options, given_by_setting

    monkeypatch.setattr(runtime, "use_shared_hisparse_host_pool", lambda config: shared)
    config = start(local_world_size=ranks, data_parallel_size_local=replicas, data_parallel_size=replicas or 2)
    give_options(config)
    assert config.attention_config.hisparse_config.device_buffer_size == 6144
    assert config.attention_config.backend.name == "FLASHMLA_SPARSE"
    assert config.kv_transfer_config.kv_connector == "HiSparseConnector"
    assert config.kv_transfer_config.kv_connector_extra_config["host_pool_gib"] == size_gib
    assert given_by_setting(config)
    given = config.kv_transfer_config
    give_options(config)  # options that are there stay
    assert config.kv_transfer_config is given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_config": SimpleNamespace(model="m", hf_config=object())}, "model m: expected a DSA model"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: expected 1, got 2"),
        ({"decode_context_parallel_size": 4}, "decode_context_parallel_size: expected 1, got 4"),
        ({"kv_offloading_size": 8.0}, "--kv-offloading-size: expected none, got 8.0"),
        ({"hot_tokens": 1024}, "hisparse.hot_tokens: expected >= 2048"),
        ({"hot_tokens": 40_000}, "hisparse.hot_tokens: expected <= 32768"),
    ],
)
def test_a_start_that_the_setting_cannot_serve_is_refused_by_its_name(changes: dict[str, Any], message: str) -> None:
    from baige_device.engines.vllm.cuda_options import give_options
    from baige_device.errors import MountError, SettingsError

    with pytest.raises((MountError, SettingsError), match=message):
        give_options(start(**changes))


def test_what_vllm_refuses_then_names_the_setting_too() -> None:
    from baige_device.engines.vllm.cuda_options import configuring
    from baige_device.errors import MountError

    def refuse(config: Any) -> None:
        raise ValueError("HiSparse requires something")

    with pytest.raises(MountError, match=r"hisparse\.host_gib_per_node is set.*HiSparse requires something"):
        configuring(refuse)(start())
    plain = start()
    plain.additional_config = {}
    with pytest.raises(ValueError, match=r"^HiSparse requires something"):
        configuring(refuse)(plain)


def test_the_whole_nodes_pool_is_checked_before_anything_is_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    from baige_device.engines.vllm import cuda_features
    from baige_device.engines.vllm.cuda_options import give_options
    from baige_device.errors import HostMemoryError

    config = start(local_world_size=2, data_parallel_size_local=4, data_parallel_size=4)
    config.additional_config["baige"]["hisparse"]["host_gib_per_node"] = 1e6
    give_options(config)
    monkeypatch.setattr(cuda_features, "activate_process", lambda *args: pytest.fail("activated"))
    with pytest.raises(HostMemoryError, match=r"host_gib_per_node = 1e\+06 GiB over 8 local ranks"):
        cuda_features._decide(config)


def test_the_setting_reaches_vllms_configuration() -> None:
    answer = run("cuda_platform", BAIGE_BACKEND="cuda", BAIGE_HISPARSE__HOST_GIB_PER_NODE="3").answer
    assert answer["pool"] == {"host_pool_gib": 3, "given_by": "baige_device"}
    assert answer["hisparse"]
    answer = run("cuda_platform", BAIGE_BACKEND="cuda").answer
    assert answer["pool"] is None
    assert not answer["hisparse"]


@pytest.mark.parametrize(
    ("switches", "connector", "kind", "on"),
    [
        ({}, "HiSparseConnector", "managed", {"attention", "swap", "mirror", "pool"}),
        ({"host_alloc": "off"}, "HiSparseConnector", "managed", {"attention", "swap", "mirror"}),
        ({"host_alloc": "portable"}, "HiSparseConnector", "pinned", {"attention", "swap", "mirror"}),
        ({"uva_sparse_scatter": "off"}, "HiSparseConnector", "managed", {"attention", "swap", "pool"}),
        ({"hot_cache_resolve": "off"}, "HiSparseConnector", "managed", {"attention"}),
        ({"sparse_attention": "off"}, "HiSparseConnector", "managed", {"swap", "mirror", "pool"}),
        ({}, "MultiConnector", "managed", {"attention", "swap", "mirror"}),
        ({"index_topk": "portable"}, None, "managed", {"attention", "index"}),
    ],
)
def test_what_is_on_follows_the_switches(
    switches: dict[str, str], connector: str | None, kind: str, on: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from baige_device.engines.vllm import cuda_features

    text = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="m", hf_text_config=SimpleNamespace(**text), get_num_attention_heads=lambda parallel: 128
        ),
        parallel_config=None,
        cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla", block_size=64),
        attention_config=SimpleNamespace(hisparse_config=connector and object()),
        kv_transfer_config=connector and SimpleNamespace(kv_connector=connector, kv_connector_extra_config={}),
    )
    settings = Settings.model_validate({"ops": switches})

    def activated(vllm_config: Any, needs: list[Any], optimizations: tuple[str, ...]) -> Any:
        assert optimizations == (("hisparse",) if connector else ())
        chosen = SimpleNamespace(offer=SimpleNamespace(facts={"kind": kind}))
        found = {need.op: SimpleNamespace(chosen=chosen) for need in needs}
        return SimpleNamespace(record=SimpleNamespace(backend="cuda"), ops=current().ops, resolutions=found)

    monkeypatch.setattr(cuda_features, "engine_settings", lambda vllm_config: settings)
    monkeypatch.setattr(cuda_features, "activate_process", activated)
    monkeypatch.setattr(cuda_features, "_patches", lambda: ())
    decided = cuda_features._decide(config)
    names = ("attention", "swap", "mirror", "pool", "index", "overlap")
    assert {name for name in names if getattr(decided, name)} == on
