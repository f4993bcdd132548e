"""quantize_blocks and dequantize_blocks against an fp8 grid made from its definition; user-demand cases A7 and A14."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from baige_device.errors import ContractError
from baige_device.registry.table import OpTable

BLOCKS = [(128, 128), (1, 0), (3, 5)]


def e4m3_grid() -> np.ndarray:
    """All magnitudes of float8 e4m3fn: 3 bits of mantissa, bias 7, subnormals, no infinity, 0x7f is NaN."""
    small = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array(small + normal[:-1])


def nearest_even(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Magnitudes rounded to the grid; between two neighbours of equal distance, the one with the even code."""
    distance = np.abs(np.abs(values)[..., None] - grid)
    best = distance.min(-1, keepdims=True)
    tied = distance == best
    even = tied & (np.arange(len(grid)) % 2 == 0)
    code = np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))
    return np.sign(values) * grid[code]


def element_scales(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> np.ndarray:
    height, width = block[0], block[1] or shape[1]
    rows, columns = np.arange(shape[0]) // height, np.arange(shape[1]) // width
    return scales.numpy()[rows[:, None], columns[None, :]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("wire", "largest"), [("fp8_e4m3", 448.0), ("int8_absmax", 127.0)])
def test_scale_and_rounding(
    ops: OpTable, wire: str, largest: float, block: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(130, 7).mul(torch.logspace(-3, 3, 7)).to(dtype)
    payload, scales = ops.quantize_blocks(weight, block=block, wire=wire)
    height, width = block[0], block[1] or 7
    assert payload.is_contiguous()
    assert scales.shape == (-(-130 // height), -(-7 // width))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            amax = weight[i * height : (i + 1) * height, j * width : (j + 1) * width].abs().max()
            assert scales[i, j] == amax.float() / largest
    scaled = weight.float().numpy() / element_scales(scales, weight.shape, block)  # fp32 by fp32
    grid = e4m3_grid() if wire == "fp8_e4m3" else np.arange(128.0)
    np.testing.assert_array_equal(payload.float().numpy(), nearest_even(scaled, grid))

    back = ops.dequantize_blocks(payload, scales, block=block, dtype=dtype)
    product = torch.from_numpy(payload.float().numpy() * element_scales(scales, weight.shape, block))
    assert torch.equal(back, product.to(dtype))


def test_bf16_wire_is_not_scaled_and_saturates(ops: OpTable) -> None:
    weight = torch.tensor([[1.0, -1.00390625, 3.4e38, -3.4e38]])
    payload, scales = ops.quantize_blocks(weight, wire="bf16")
    largest = torch.finfo(torch.bfloat16).max
    assert payload.tolist() == [[1.0, -1.0, largest, -largest]]
    assert scales.tolist() == [[1.0]]
    own = weight.bfloat16().clamp(-1, 1)
    assert ops.quantize_blocks(own, wire="bf16")[0].data_ptr() != own.data_ptr()


@pytest.mark.parametrize("wire", ["fp8_e4m3", "int8_absmax"])
@pytest.mark.parametrize("tiny", [0.0, 1e-40, 1e-37])
def test_zero_and_tiny_blocks_come_back_as_zeros(ops: OpTable, wire: str, tiny: float) -> None:
    weight = torch.randn(256, 256)
    weight[128:, :128] = tiny
    payload, scales = ops.quantize_blocks(weight, wire=wire)
    assert (scales > 0).all()
    assert scales.reciprocal().isfinite().all()
    back = ops.dequantize_blocks(payload, scales, dtype=torch.float32)
    assert back[128:, :128].eq(0).all()
    assert back[:128].isfinite().all()


def test_outlier_takes_the_block_and_no_other(ops: OpTable) -> None:
    weight = torch.full((2, 256), 1e-3)
    weight[0, 0] = 448.0
    payload, scales = ops.quantize_blocks(weight)
    assert scales[0, 0] == 1.0
    assert payload.float()[0, 0] == 448.0
    back = ops.dequantize_blocks(payload, scales, dtype=torch.float32)
    torch.testing.assert_close(back[:, 128:], weight[:, 128:], rtol=2**-4, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire", ["fp8_e4m3", "int8_absmax", "bf16"])
def test_nan_and_inf_name_weight_and_block(ops: OpTable, wire: str, bad: float) -> None:
    weight = torch.randn(300, 300)
    weight[299, 130] = bad
    with pytest.raises(
        ContractError, match=r"weight 'o_proj': expected finite numbers, got (nan|inf) in block \[2, 1\]"
    ):
        ops.quantize_blocks(weight, wire=wire, name="o_proj")


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("block", BLOCKS)
def test_empty(ops: OpTable, shape: tuple[int, int], block: tuple[int, int]) -> None:
    payload, scales = ops.quantize_blocks(torch.zeros(shape), block=block)
    assert payload.shape == shape
    assert ops.dequantize_blocks(payload, scales, block=block).shape == shape


def test_odd_strides(ops: OpTable) -> None:
    base = torch.randn(64, 40)
    for view in (base.t(), base[:, ::2], base[:1].expand(9, 40), base.flatten()[1:61].view(5, 12)):
        payload, scales = ops.quantize_blocks(view, block=(4, 4))
        same_payload, same_scales = ops.quantize_blocks(view.clone(memory_format=torch.contiguous_format), block=(4, 4))
        assert payload.is_contiguous()
        assert torch.equal(payload.view(torch.uint8), same_payload.view(torch.uint8))
        assert torch.equal(scales, same_scales)


def test_dequantize_into_a_buffer_with_gaps(ops: OpTable) -> None:
    payload, scales = ops.quantize_blocks(torch.randn(6, 8), block=(4, 4))
    buffer = torch.full((6, 20), 12345.0, dtype=torch.float16)
    ops.dequantize_blocks(payload, scales, block=(4, 4), out=buffer[:, 3:11])
    assert torch.equal(buffer[:, 3:11], ops.dequantize_blocks(payload, scales, block=(4, 4), dtype=torch.float16))
    assert torch.equal(buffer[:, :3], torch.full((6, 3), 12345.0, dtype=torch.float16))
