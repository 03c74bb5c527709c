import pytest
import torch

import pergrad
from pergrad.testing import loop_grads

pytest.importorskip("peft")
pytest.importorskip("transformers")

import lora as demo

pytestmark = [
    # What the libraries themselves warn of.
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def model():
    return demo.adapted_llama(2, seed=0).double()


@pytest.fixture(scope="module")
def texts():
    return demo.random_texts(5, 8, seed=1)


def test_the_adapters_alone_are_recorded_and_reached(model, texts):
    found = pergrad.grads(model, demo.losses, *texts)
    assert len(found) == 2 * 2 * 3  # A and B, of two layers, of three modules
    assert all(".lora_A." in name or ".lora_B." in name for name in found)
    assert all(bool(grad.flatten(1).any(1).all()) for grad in found.values())


def test_norms_are_those_of_texts_run_alone(model, texts):
    grads = loop_grads(model, demo.losses, *texts)
    expected = torch.cat([grad.flatten(1) for grad in grads.values()], dim=1).norm(dim=1)
    torch.testing.assert_close(pergrad.norms(model, demo.losses, *texts), expected)


def test_padding_is_not_in_the_gradients(model, texts):
    tokens, mask = texts
    assert not mask.all()
    norms = pergrad.norms(model, demo.losses, tokens, mask)
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = tokens[row : row + 1, :length], mask[row : row + 1, :length]
        torch.testing.assert_close(pergrad.norms(model, demo.losses, *alone), norms[row : row + 1])


def test_main_verifies_its_gradients(capsys):
    assert demo.main(["--samples", "3", "--longest", "5", "--rank", "2"]) == 0
    assert "all right: 12 parameters" in capsys.readouterr().out
