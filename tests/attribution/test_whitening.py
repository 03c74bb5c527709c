import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pergrad
from pergrad.attribution.whitening import whitening
from tests.attribution.gradient_cases import gradients


@pytest.mark.parametrize("width", [1, 2, 5, 60, 300])
def test_whitening_is_the_inverse_of_the_cholesky_factor(width) -> None:
    rows = gradients(2 * width, width)
    matrix = rows.T @ rows + np.eye(width)
    expected = np.linalg.inv(np.linalg.cholesky(matrix))
    np.testing.assert_allclose(whitening(matrix), expected, rtol=1e-9, atol=1e-12)


def test_whitening_whitens() -> None:
    rows = gradients(50, 8)
    matrix = rows.T @ rows
    found = whitening(matrix)
    np.testing.assert_allclose(found @ matrix @ found.T, np.eye(8), atol=1e-12)


def test_findings_are_the_same_to_the_last_digit_on_any_number_of_threads() -> None:
    code = """
import hashlib
from pergrad.attribution import analyse
from tests.attribution.gradient_cases import gradients, samples_of
for samples, width in ((60, 256), (700, 256), (900, 40)):
    found = analyse(samples_of(gradients(samples, width)))
    columns = (found.alignment, found.self_influence, found.suspicion, found.pushes.dot)
    print(*(hashlib.sha256(column.tobytes()).hexdigest() for column in columns))
"""
    roots = [str(Path(pergrad.__file__).parents[1]), str(Path(__file__).parents[2])]
    printed = set()
    for threads in ("1", "4"):
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(roots),
            **dict.fromkeys(names, threads),
        }
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(run.stdout)
    assert len(printed) == 1
