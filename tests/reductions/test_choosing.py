"""The ways that every machine takes, as a table: a change of any of them shows here.

No GPU is needed: which way is taken follows from sizes, types and the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from pergrad.factors import Convolution, OuterProduct
from pergrad.factors import choosing as factor_choosing
from pergrad.factors.products import GRADIENT_WAYS
from pergrad.factors.tables import TABLE_SUM_WAYS
from pergrad.reductions import choosing, gram, inner, norms, sketches, sums
from pergrad.reductions.choosing import chooser_for
from pergrad.rules.cells import LSTM_WAYS
from pergrad.runtime import MACHINES, NEVER, Chooser, Machine
from pergrad.runtime.caches import clear_caches

CPU, GPU = MACHINES["cpu", "eager"], MACHINES["cuda", "eager"]
TRACED_GPU = MACHINES["cuda", "traced"]
OTHERS = [machine for machine in MACHINES.values() if machine is not GPU]

# Samples, positions, outputs and inputs; of all their combinations, one letter each below.
SIZES = [*product((1, 32), (1, 4, 64, 600), (48, 768, 3072), (48, 768))]
# Channels, outputs, width, taps and dimensions.
CONVOLUTIONS = [*product((16, 256), (16, 256), (4, 16), (1, 3), (2, 3))]


def outer(dtype: torch.dtype, n: int, t: int, o: int, i: int) -> OuterProduct:
    one = torch.empty((), dtype=dtype, device="meta")
    return OuterProduct(one.expand(n, t, o), one.expand(n, t, i))


def convolution(c: int, o: int, width: int, taps: int, dims: int) -> Convolution:
    one, space = torch.empty((), device="meta"), [width] * dims
    padding = ((taps // 2, taps // 2),) * dims
    kernel = (o, c, *[taps] * dims)
    g, x = one.expand(2, 1, o, *space), one.expand(2, 1, c, *space)
    return Convolution(g, x, kernel, (1,) * dims, padding, (1,) * dims, 1)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Machine, bool], None]]:
    """Has reductions choose as they would on a machine, with kernels or without."""

    def go(machine: Machine, has_kernels: bool) -> None:
        def chooser_of(*_: Any, by_kernels: bool = True) -> Chooser:
            return chooser_for(machine, has_kernels and by_kernels)

        for module in (norms, sums, gram):
            monkeypatch.setattr(module, "chooser_of", chooser_of)

    yield go
    clear_caches()


def letters(ways: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **named: str) -> None:
    """Replaces the functions of some ways by functions that return a letter."""
    for letter, way in named.items():
        monkeypatch.setitem(ways, way, lambda *_, letter=letter: letter)


BY_TORCH = "rrrrrrGGGIGIGGGIGIGGGGGIrrrrrrGIIIIIGGGIGIGGGGGI"
SMALL = [6, 7, 8, 10, 12, 30]  # fewer than a million multiplications
NORMS = {
    (False, torch.float32): BY_TORCH,
    (False, torch.bfloat16): BY_TORCH,
    (True, torch.float32): "RRRRRRGGGGGGGGGGGGGGGGGGRRRRRRGGGIGIGGGIGIGGGGGI",
    (True, torch.bfloat16): "RRRRRRTTTTTTTTTTTTTTTTTTRRRRRRTTTTTTTTTTTITTTTTI",
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=str)
def test_norms_of_outer_products(
    machine: Machine, on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"r": "rank one", "I": "inner products", "G": "gradients", "T": "tile kernel"}
    letters(norms.OUTER_PRODUCT_WAYS, monkeypatch, R="rank one kernel", **names)
    letters(norms.OUTER_PRODUCT_WAYS, monkeypatch, g="small gradients")
    for (has_kernels, dtype), expected in NORMS.items():
        on(machine, has_kernels)
        ways = [norms.squared_norms_of(outer(dtype, *sizes), 2**25) for sizes in SIZES]
        found = "".join(map(str, ways))
        assert found.replace("g", "G") == expected
        is_small = machine is CPU and dtype is torch.float32 and not has_kernels
        assert [k for k, way in enumerate(found) if way == "g"] == (SMALL if is_small else [])


LAUNCHES = {  # (s)hared or (a)lone, by type and bits of the bound
    (torch.float32, 20): "aaaaaassssssasssssaaaaaaaaaaaassssssaaaaaaaaasas",
    (torch.float32, 28): "aaaaaassssssasssssaaasasaaaaaassssssasssssaaasas",
    (torch.bfloat16, 20): "aaaaaasssssssssssssssaaaaaaaaasssssssaasasaaasas",
    (torch.bfloat16, 28): "aaaaaassssssssssssssssssaaaaaassssssssssssaaasas",
}


@pytest.mark.parametrize(("dtype", "bits"), LAUNCHES)
def test_launches_of_outer_products(dtype: torch.dtype, bits: int, on: Callable[..., None]) -> None:
    for machine in MACHINES.values():
        on(machine, True)
        found = [norms.launch_of([outer(dtype, *sizes)], 2**bits) for sizes in SIZES]
        assert "".join("a" if one is None else "s" for one in found) == LAUNCHES[dtype, bits]
        on(machine, False)
        assert norms.launch_of([outer(dtype, *SIZES[-1])], 2**bits) is None


SUMS = {  # (t)ogether or (a)lone, of halves
    "eager": "aaaaaaaaaaaatttttttttttaaaaaaaaaaaaatttaaataaaaa",
    "traced": "aaaaaaaaaaaattttttttttttaaaaaaaaaaaatttttttttttt",
    "compiled": "aaaaaaaaaaaattttttttttttaaaaaaaaaaaatttttttttttt",
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=str)
def test_sums_of_outer_products(machine: Machine, on: Callable[..., None]) -> None:
    on(machine, True)
    halves = [[outer(torch.bfloat16, *sizes)] for sizes in SIZES]
    found = [sums.shares_a_launch_of_sums(factors, 2**22) for factors in halves]
    assert "".join("t" if one else "a" for one in found) == SUMS[machine.mode]
    whole = [[outer(torch.float32, *sizes)] for sizes in SIZES]
    assert not any(sums.shares_a_launch_of_sums(factors, 2**22) for factors in whole)
    on(machine, False)
    assert not any(sums.shares_a_launch_of_sums(factors, 2**22) for factors in halves)


@pytest.mark.parametrize(
    ("has_kernels", "expected"),
    [(False, "GGGGGGGGGGIIGGGGGGGGGGGGIIIIGGGG"), (True, "TGTGTGTGTGPITGPGTGTGTGTGTIPITGPG")],
)
def test_norms_of_convolutions(
    has_kernels: bool, expected: str, on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"I": "inner products", "G": "gradients", "T": "tile kernel", "P": "pair kernel"}
    letters(norms.CONVOLUTION_WAYS, monkeypatch, **ways)
    on(GPU, has_kernels)
    found = [norms.squared_norms_of(convolution(*sizes), 2**25) for sizes in CONVOLUTIONS]
    assert "".join(map(str, found)) == expected


def test_inner_products_of_all_samples() -> None:
    expected = "pppppppppppprrrprprrrrrppppppppppppprrrrrrrrrrrr"  # (p)airs of positions or (r)ows
    for machine, has_kernels in product(MACHINES.values(), (False, True)):
        chooser = chooser_for(machine, has_kernels)
        found = [
            chooser.pick("gram of an outer product", ((n, t, o), (n, t, i))) for n, t, o, i in SIZES
        ]
        assert "".join(way[0] for way in found) == expected


# What depends on the machine alone: CPU, GPU and other devices, each eager, traced and compiled.
BY_MACHINE = {
    "mending": "computed again|left as found|left as found" + "|left as found" * 6,
    "mending of an outer product": "computed again|in an operation|in an operation"
    + "|left as found" * 6,
    "inner products of samples": "batched product|" * 3
    + "multiplied and summed|" * 5
    + "multiplied and summed",
    "check of a gram": "computed again" + "|left as found" * 8,
    "scaled samples": "in torch, dropped ones looked for|in torch|in torch|"
    + "in torch, rounded|" * 3
    + "in torch|in torch|in torch",
    "dropped samples": "looked for" + "|zeroed" * 8,
    "weighted rows": "one product|scaled and summed unless large|scaled and summed unless large"
    + "|one product|scaled and summed|scaled and summed" * 2,
    "buckets": "by row|" * 3 + "by column|" * 5 + "by column",
    "sums of small gradients": "one by one" + "|one by one" * 8,
}
WITH_KERNELS = {  # the same on a GPU
    "mending": "left as found|left as found|left as found",
    "mending of an outer product": "kernel|kernel|kernel",
    "scaled samples": "kernel|kernel|in torch, rounded",
    "dropped samples": "kernel|kernel|zeroed",
    "weighted rows": "kernel|kernel|scaled and summed",
    "sums of small gradients": "together|together|together",
    "joint sums of outer products": "kernel|products, mended|products, mended",
    "launches of parameters": "shared|shared|shared",
}
OF_FACTORS = {
    "normalised input": "written|written|written" + "|left to reductions" * 3 + "|written" * 3,
    "step of an LSTM": "spelled out|" * 3 + "fused|fused|fused" + "|spelled out" * 3,
    "cast of a recurrent input": "in each step|" * 3 + "once|once|once" + "|in each step" * 3,
    "gradients of steps": "in place|stacked|stacked" + "|in place|stacked|stacked" * 2,
}


@pytest.mark.parametrize("choice", BY_MACHINE)
def test_ways_of_each_machine(choice: str) -> None:
    found = [chooser_for(machine, False).pick(choice) for machine in MACHINES.values()]
    assert "|".join(found) == BY_MACHINE[choice]


@pytest.mark.parametrize("choice", WITH_KERNELS)
def test_ways_of_a_gpu_with_kernels(choice: str) -> None:
    modes = [machine for machine in MACHINES.values() if machine.device == "cuda"]
    assert "|".join(chooser_for(m, True).pick(choice) for m in modes) == WITH_KERNELS[choice]


@pytest.mark.parametrize("choice", OF_FACTORS)
def test_ways_of_factors_and_rules(choice: str) -> None:
    found = [factor_choosing.CHOOSERS[machine].pick(choice) for machine in MACHINES.values()]
    assert "|".join(found) == OF_FACTORS[choice]


def test_ways_of_a_group_norm() -> None:
    problems = [*product((False, True), (False, True))]  # statistics are known; torch has a kernel
    for machine in MACHINES.values():
        chooser = factor_choosing.CHOOSERS[machine]
        found = [chooser.pick("gradients of a group norm", problem)[:7] for problem in problems]
        if machine.mode == "compiled":
            assert found == ["sums sh"] * 4
        elif machine.device == "cuda":
            assert found == ["written", "sums of", "left to", "left to"]
        else:
            assert found == ["written", "sums of", "written", "sums of"]


def test_ways_of_a_convolutions_gradient() -> None:
    # channels, taps, positions and groups
    problems = [(16, 9, 32, 1), (16, 9, 31, 1), (16, 9, 128, 1), (16, 1, 128, 1), (8, 9, 128, 1)]
    of_depth = [(1, 9, 0, 2), (1, 9, 99, 1)]
    for machine in MACHINES.values():
        chooser = factor_choosing.CHOOSERS[machine]
        found = [chooser.pick("gradient of a kernel", p)[0] for p in (*problems, *of_depth)]
        assert "".join(found) == ("wwswwsw" if machine.device == "cuda" else "swswwsw")
        order = [chooser.pick("order of windows", p)[0] for p in ((8, 8), (8, 9), (9, 8))]
        assert "".join(order) == ("ctc" if machine.device == "cpu" else "ttt")


# Sanity of the tables themselves

WAYS: dict[str, dict[str, Any]] = {
    "norms of one position": norms.OUTER_PRODUCT_WAYS,
    "norms of an outer product": norms.OUTER_PRODUCT_WAYS,
    "norms of a table": norms.TABLE_WAYS,
    "norms of a convolution": norms.CONVOLUTION_WAYS,
    "mending": norms.MENDING_WAYS,
    "mending of an outer product": norms.MENDING_WAYS,
    "inner products of samples": inner.INNER_PRODUCT_WAYS,
    "scaled samples": sums.SCALING_WAYS,
    "dropped samples": sums.DROPPING_WAYS,
    "weighted rows": sums.WEIGHTED_ROWS_WAYS,
    "joint sums of outer products": sums.JOINT_SUM_WAYS,
    "sketch of an outer product": sketches.SKETCH_WAYS,
    "buckets": sketches.BUCKET_WAYS,
    "products of transforms": sketches.PRODUCT_WAYS,
    "gradient of an outer product": GRADIENT_WAYS,
    "sums by row": TABLE_SUM_WAYS,
    "step of an LSTM": LSTM_WAYS,
}


def test_every_way_in_a_table_is_a_way_that_there_is() -> None:
    reductions = [chooser_for(m, k) for m, k in product(MACHINES.values(), (False, True))]
    for chooser in (*reductions, *factor_choosing.CHOOSERS.values()):
        for choice, costs in chooser.table.items():
            named = {costs} if isinstance(costs, str) else set(costs)
            assert named <= WAYS.get(choice, dict.fromkeys(named)).keys(), choice


def test_kernels_count_only_where_they_run() -> None:
    t = torch.ones(2)
    assert choosing.chooser_of(t) is chooser_for(CPU, False)
    assert choosing.chooser_of(t, by_kernels=False) is chooser_for(CPU, False)


# Both sides of every threshold


def test_inner_products_begin_where_calls_no_longer_dominate() -> None:
    def way(n: int, t: int, o: int, i: int) -> str:
        sizes = ((n, t, o), (n, t, i), torch.float32, torch.float32)
        return chooser_for(CPU, False).pick("norms of an outer product", sizes)

    assert way(1, 10, 100, 1000) == "inner products"
    assert way(1, 10, 100, 999) == "small gradients"
    assert way(100, 20, 40, 40) == "gradients"  # as many multiplications either way
    assert way(100, 19, 40, 40) == "inner products"


def test_small_gradients_are_in_one_wide_type() -> None:
    single, double, half = torch.float32, torch.float64, torch.bfloat16
    for types, is_small in (
        ((single, single), True),
        ((double, double), True),
        ((single, double), False),
        ((half, half), False),
    ):
        sizes = ((2, 3, 4), (2, 3, 5), *types)
        way = chooser_for(CPU, False).pick("norms of an outer product", sizes)
        assert (way == "small gradients") is is_small


def test_tables_are_written_out_if_small_or_mostly_used() -> None:
    def way(machine: Machine, n: int, rows: int, i: int, t: int) -> str:
        return chooser_for(machine, False).pick("norms of a table", ((n, rows, i), t))

    for machine in MACHINES.values():
        assert way(machine, 4, 64, 32, 16) == "whole table"
        assert way(machine, 4, 10**6, 32, 16) == "rows added up"
        assert way(machine, 10, 1000, 10, 999) == "whole table"
        assert way(machine, 10, 1001, 10, 999) == "rows added up"
        assert way(machine, 10, 1001, 10, 1001) == "whole table"
        assert way(machine, 0, 64, 32, 16) == "whole table"


def test_no_program_of_a_gpu_adds_up_most_positions_of_a_sample() -> None:
    for machine in MACHINES.values():
        if machine.device == "cuda":
            chooser = chooser_for(machine, True)
            token_types, words = ((16, 2, 768), 512), ((16, 30_000, 768), 512)
            assert chooser.pick("norms of a table", token_types) == "whole table"
            assert chooser.pick("norms of a table", words) == "kernel"


def test_positions_are_multiplied_with_few_rows_and_added_to_many() -> None:
    # Positions, rows, columns, and columns of all samples with that index: T5, BEiT, token types
    repeated = [(2**18, 32, 12, 192), (38_809, 732, 12, 384), (8192, 2, 768, 768)]
    once, words = (512, 512, 768, 16 * 768), (8192, 30_000, 768, 768)
    for machine in MACHINES.values():
        pick = factor_choosing.CHOOSERS[machine].pick
        found = "".join(pick("sums by row", sizes)[0] for sizes in (*repeated, once, words))
        on_gpu = "mmmaa" if machine.mode == "compiled" else "mamaa"
        assert found == (on_gpu if machine.device == "cuda" else "aamaa")
        assert pick("sums by row", (4, 3, 0, 0)) == "added"  # no sample


def test_tile_kernels_read_two_halves_only() -> None:
    halves, single = torch.bfloat16, torch.float32
    chooser = chooser_for(GPU, True)
    for types, way in (
        ((halves, halves), "tile kernel"),
        ((halves, torch.float16), "inner products"),
        ((single, single), "gradients"),
    ):
        sizes = ((4, 64, 768), (4, 64, 768), *types)
        assert chooser.pick("norms of an outer product", sizes) == way


def test_microseconds_of_products_by_torch() -> None:
    g, x = (2, 10, 30), (2, 10, 70)
    fixed = 20.0 + 2 * 10 * 10 * 24 / 4e6
    products = 2 * 10 * 10 * 100
    found = choosing._products_by_torch(g, x, torch.float32)
    assert found == pytest.approx(fixed + products / 2e7, rel=1e-12)
    found = choosing._products_by_torch(g, x, torch.bfloat16)
    assert found == pytest.approx(fixed + products / 4e8, rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "way"),
    [  # samples, positions, outputs and inputs; the times are of an H200
        ((8, 1024, 151936, 896), "inner products"),  # the head of Qwen2: gradients took 4.8 ms
        ((8, 1024, 128256, 2048), "inner products"),  # of a Llama of 1B: 2.7 ms
        ((16, 512, 50272, 512), "inner products"),  # of OPT-350M
        ((64, 3136, 384, 96), "tile kernel"),  # Swin-T and ConvNeXt-T
        ((64, 784, 192, 192), "tile kernel"),
        ((8, 1024, 16, 4096), "tile kernel"),  # LoRA
    ],
)
def test_norms_of_large_products_by_microseconds(sizes: tuple[int, ...], way: str) -> None:
    n, t, o, i = sizes
    problem = ((n, t, o), (n, t, i), torch.bfloat16, torch.bfloat16)
    for machine in (m for m in MACHINES.values() if m.device == "cuda"):
        assert chooser_for(machine, True).pick("norms of an outer product", problem) == way


def test_microseconds_of_gradients_by_torch_are_whole_waves_in_halves() -> None:
    half = torch.bfloat16
    one, two = (choosing._gradients_by_torch((n, 64, 100), (n, 64, 9), half) for n in (132, 133))
    assert one == pytest.approx(20 + 132 * 7200 / 4e6 + 132 * 128**2 * 64 / 4e8, rel=1e-12)
    assert two == pytest.approx(20 + 133 * 7200 / 4e6 + 264 * 128**2 * 64 / 4e8, rel=1e-12)


def test_microseconds_of_the_best_launch_alone() -> None:
    g, x = (2, 10, 30), (2, 10, 70)
    found = choosing._best_alone(g, x, torch.float32)
    assert found == pytest.approx(2 * 10 * 30 * 70 / 2e7 + 2 * 30 * 70 * 8 / 4e6, rel=1e-12)
    g, x = (2, 4, 30000), (2, 4, 30000)
    found = choosing._best_alone(g, x, torch.float32)
    assert found == choosing._products_by_torch(g, x, torch.float32)


@pytest.mark.parametrize("t", [1, 2])
def test_one_position_shares_no_launch_of_inner_products(t: int) -> None:
    sizes = ((2, t, 48), (2, t, 48))
    same, other = (torch.bfloat16,) * 2, (torch.bfloat16, torch.float16)
    costs = [choosing._shared_gram_kernel(*sizes, *types, 2**30, None) for types in (same, other)]
    assert [cost == NEVER for cost in costs] == [t == 1, True]


def test_launch_of_inner_products_is_alone_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Launchers:
        @staticmethod
        def gram_microseconds(*sizes: Any, is_alone: bool) -> float:
            assert sizes == (2, 8, 48, 16, torch.bfloat16)
            return float(is_alone)

    monkeypatch.setattr(choosing, "all_launchers", Launchers)
    held = 2 * 8 * (48 + 16) * 2
    sizes = ((2, 8, 48), (2, 8, 16), torch.bfloat16, torch.bfloat16)
    assert choosing._shared_gram_kernel(*sizes, held, None) == 0
    assert choosing._shared_gram_kernel(*sizes, held - 1, None) == 1


def test_kernels_of_convolutions_have_up_to_two_dimensions() -> None:
    chooser = chooser_for(GPU, True)
    for sizes in ((256, 64, 144), (4, 256, 2304)):
        ways = [chooser.pick("norms of a convolution", (*sizes, dims)) for dims in (1, 2, 3)]
        assert ways[0] == ways[1] != "torch"
        assert ways[2] == "torch"


@pytest.mark.parametrize(
    ("sizes", "way"),
    [  # of layers of ResNet-50 and ViT-B: positions, outputs, channels and taps
        ((12544, 64, 3, 49), "gradients"),
        ((196, 768, 3, 256), "gradients"),
        ((3136, 64, 64, 1), "tile kernel"),
        ((784, 512, 128, 1), "tile kernel"),
        ((784, 128, 128, 9), "tile kernel"),
        ((196, 256, 256, 9), "pair kernel"),
        ((49, 2048, 512, 1), "pair kernel"),
    ],
)
def test_kernels_of_convolutions_load_channels_in_wide_pieces(
    sizes: tuple[int, ...], way: str
) -> None:
    positions, outputs, channels, taps = sizes
    one_tap = (64, torch.bfloat16) if taps == 1 else None
    problem = (positions, outputs, channels * taps, 2, False, channels, one_tap)
    for machine in (m for m in MACHINES.values() if m.device == "cuda"):
        assert chooser_for(machine, True).pick("norms of a convolution", problem) == way
    assert chooser_for(GPU, True).pick("norms of a convolution", (8, 4, 27, 3, False, 3)) == "torch"


def test_windows_are_multiplied_transposed_where_their_gradient_has_odd_rows() -> None:
    for machine, chooser in factor_choosing.CHOOSERS.items():
        for outputs, columns, is_half in ((64, 147, True), (64, 144, True), (64, 147, False)):
            way = chooser.pick("product of windows", (outputs, columns, is_half))
            is_odd = machine.device == "cuda" and columns == 147 and is_half
            assert way == ("transposed" if is_odd else "as it is")
        assert chooser.pick("product of windows", (63, 147, True)) == "as it is"


def test_a_depthwise_kernel_gives_gradients_and_their_norms() -> None:
    for mode in ("eager", "traced", "compiled"):
        machine = MACHINES["cuda", mode]
        sizes = (1, 49, 10**6, 96)
        assert (
            factor_choosing.CHOOSERS[machine].pick("gradient of a kernel", (*sizes, True))
            == "kernel"
        )
        of_norms = (3136, 1, 49, 2)
        chooser = chooser_for(machine, True)
        assert chooser.pick("norms of a convolution", (*of_norms, True)) == "gradients"
        assert chooser.pick("norms of a convolution", (*of_norms, False)) != "gradients"


def test_windows_meet_in_pairs_where_positions_are_few() -> None:
    chooser = chooser_for(CPU, False)
    # outputs · columns against positions · (outputs + columns)
    for positions, way in ((4, "inner products"), (5, "gradients"), (6, "gradients")):
        assert chooser.pick("norms of a convolution", (positions, 10, 10, 2)) == way


def test_sketches_of_entries_and_transforms_meet_where_they_cost_the_same() -> None:
    size = 8  # 3 · 8 · 4 operations for each position
    for o, is_cheaper in ((95, False), (96, False), (97, True)):
        assert choosing.fourier_is_cheaper(5, o, 1, size) is is_cheaper
        way = chooser_for(CPU, False).pick("sketch of an outer product", (5, o, 1, size))
        assert (way == "transforms") is is_cheaper


def test_buckets_are_read_on_a_gpu_and_compiled_and_written_by_runs_on_a_cpu() -> None:
    for machine in MACHINES.values():
        chooser = chooser_for(machine, False)
        is_gathered = machine.device == "cuda" or machine.mode == "compiled"
        by_runs = "runs" if machine.device == "cpu" else "single entries"
        assert chooser.pick("sketch of columns") == ("gathered" if is_gathered else by_runs)
        rows = "gathered" if is_gathered else "single entries"
        assert chooser.pick("sketch of rows") == rows


def test_halves_of_32_positions_are_summed_together_up_to_the_bound() -> None:
    half, other = torch.bfloat16, torch.float16
    for machine, beyond in ((GPU, "one by one"), (TRACED_GPU, "together")):
        for sizes, way in (
            ((32, 100, half, half, 200), "together"),
            ((31, 100, half, half, 200), "one by one"),
            ((32, 100, half, half, 199), beyond),
            ((32, 100, half, other, 200), "one by one"),
            ((32, 50, torch.float32, torch.float32, 200), "one by one"),
        ):
            assert chooser_for(machine, True).pick("sums of outer products", sizes) == way


def test_convolutions_are_summed_in_halves_on_a_gpu_if_both_are() -> None:
    types = (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)
    for machine in MACHINES.values():
        found = [chooser_for(machine, False).pick("sum of a convolution", t) for t in types]
        assert found == ["halves" if machine.device == "cuda" else "wide", "wide"]


def test_gradients_are_kept_for_later_where_their_weighted_bytes_are_fewer() -> None:
    for machine in MACHINES.values():
        on_cpu = machine.device == "cpu"
        for is_convolution, limit in (
            (False, 170 if on_cpu else 100),
            (True, 170 if on_cpu else 25),
        ):
            found = [
                chooser_for(machine, False).pick("kept for later", (dense, 100, is_convolution))
                for dense in (limit - 1, limit + 1)
            ]
            assert found == ["gradients", "factors"]


def test_gradients_are_computed_transposed_where_lanes_would_stay_empty() -> None:
    cheaper = factor_choosing.transposed_is_cheaper
    assert cheaper(16, 9)
    assert not cheaper(17, 9)
    assert not cheaper(16, 16)
    assert not cheaper(16, 17)
    assert cheaper(32, 31)
    assert cheaper(80, 63)
    assert not cheaper(80, 65)
    assert cheaper(80, 17)
    for machine in MACHINES.values():
        chooser = factor_choosing.CHOOSERS[machine]
        found = [chooser.pick("gradient of an outer product", p) for p in ((16, 9), (16, 16))]
        assert found == ["transposed" if machine.device == "cpu" else "as it is", "as it is"]


def test_grouped_convolutions_of_few_channels_copy_windows() -> None:
    for machine in MACHINES.values():
        rate = 8 if machine.device == "cuda" else 2
        for sizes, way in (
            ((15, 2, 10**6, 1), "windows"),
            ((16, 2, 16 * rate + 1, 1), "samples as groups"),
            ((16, 2, 16 * rate - 1, 1), "windows"),
            ((16, 1, 10**6, 1), "windows"),
            ((2, 2, 10**6, 2), "windows"),
            ((1, 2, 0, 2), "samples as groups"),
            ((1, 2, 10**6, 1), "windows"),
        ):
            assert factor_choosing.CHOOSERS[machine].pick("gradient of a kernel", sizes) == way
