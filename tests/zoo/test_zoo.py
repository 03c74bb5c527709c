"""Per-sample gradients of Hugging Face models, unmodified, against one backward a sample."""

import pytest

from pergrad.errors import PergradError
from tests.zoo.architectures import ARCHITECTURES, REPRESENTATIVE
from tests.zoo.checking import cases_of, largest_error

pytestmark = [
    # What the library itself warns of.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces a better way:FutureWarning"),
]
REST = [name for name in ARCHITECTURES if name not in REPRESENTATIVE]


@pytest.mark.parametrize(
    "name", [*REPRESENTATIVE, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]
)
def test_gradients_are_those_of_the_loop(name: str) -> None:
    architecture = ARCHITECTURES[name]
    for case in cases_of(architecture):
        try:
            if architecture.refusal:
                with pytest.raises(PergradError, match=architecture.refusal):
                    largest_error(architecture, case)
            else:
                largest_error(architecture, case)
        except Exception as error:
            error.add_note(f"in the case: {case}")
            raise


def test_the_zoo_has_sixty_architectures() -> None:
    assert len({a.model for a in ARCHITECTURES.values() if not a.refusal}) >= 60
