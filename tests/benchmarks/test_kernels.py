from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.kernels import main, pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_and_torchs_way_agree_with_float64(dtype: torch.dtype) -> None:
    names = set()
    for pair in pairs(dtype, is_tiny=True):
        exact = pair.exact()
        names.add(pair.name)
        assert (pair.kernel().double() - exact).norm() <= 1e-5 * exact.norm(), pair.name
        # Torch's weighted sum in halves rounds each weight and its result.
        loose = pair.name == "weighted sum" and dtype != torch.float32
        tolerance = 2e-2 if loose else 1e-4
        assert (pair.torch().double() - exact).norm() <= tolerance * exact.norm(), pair.name
    assert len(names) == 8


def test_every_kernel_and_shape_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert {line.split()[0] for line in lines[1:]} >= {"gram", "tile", "columns", "table"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="is there a CUDA device")
def test_large_shapes_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "no CUDA device" in capsys.readouterr().err
