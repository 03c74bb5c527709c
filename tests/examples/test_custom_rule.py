import pytest
import torch

import custom_rule as demo
import pergrad
from pergrad.testing import check_rule, loop_grads

SIZES = (4, 3, 0)  # inputs, outputs, seed


@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4), (3, 3, 2, 4)])
def test_the_rule_agrees_with_one_backward_a_sample(shape):
    torch.manual_seed(0)
    centers = torch.randn(3, 4, requires_grad=True)
    gamma = torch.rand(3, requires_grad=True)
    check_rule(demo.rbf, torch.randn(shape), centers, gamma)


def test_both_layers_have_the_gradients_of_samples_run_alone():
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for function in (demo.plain_rbf, demo.rbf):
        model = demo.RadialBasis(function, *SIZES).double()
        expected = loop_grads(model, demo.losses, x)
        for name, found in pergrad.grads(model, demo.losses, x).items():
            torch.testing.assert_close(found, expected[name])


def test_the_rule_takes_the_place_of_vmap():
    x = torch.ones(5, 4)
    rungs = {}
    for function in (demo.plain_rbf, demo.rbf):
        report = pergrad.explain(demo.RadialBasis(function, *SIZES), demo.losses, x)
        rungs[function] = {row.name: row.rung for row in report.rows}
    assert rungs[demo.plain_rbf] == {"centers": "vmap", "gamma": "derived"}
    assert rungs[demo.rbf] == {"centers": "rule", "gamma": "rule"}


def test_main_explains_both(capsys):
    assert demo.main(["--samples", "8", "--inputs", "3", "--outputs", "2", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    without, _, with_rule = printed.partition("with the rule")
    assert "vmap" in without
    assert "vmap" not in with_rule
