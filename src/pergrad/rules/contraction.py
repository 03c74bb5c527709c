"""Rules for matrix products, `einsum` and `tensordot` with a weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.factors import (
    ElementProduct,
    Factor,
    OuterProduct,
    PositionSum,
    Rearranged,
    Stacked,
)
from pergrad.rules.registry import Gradients, by_shape, decomposes, implements_per_sample_grads

__all__ = ["letters_of", "terms_of"]

_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@decomposes(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def matmul(input: Tensor, other: Any = None, *, mat2: Any = None) -> Any:
    """Decomposes X @ W and W @ X, for a matrix W, into `F.linear`; stacks of matrices into `bmm`."""
    other = mat2 if other is None else other
    if not isinstance(other, Tensor):
        return NotImplemented
    dims = input.dim(), other.dim()
    if dims[0] >= 2 and dims[1] == 2:
        return F.linear(input, other.t())
    if dims[0] == 2 and dims[1] > 2:
        return F.linear(other.mT, input).mT
    return (
        torch.bmm(input, other) if dims == (3, 3) and len(input) == len(other) else NotImplemented
    )


@by_shape
def _is_affine(arguments: Mapping[str, Any], dims: Mapping[str, int]) -> bool:
    """Whether the call is b + x @ W with the samples in the rows of x."""
    scales = arguments.get("beta", 1), arguments.get("alpha", 1)
    is_row = arguments["input"].shape == arguments["mat2"].shape[1:]  # and is not expanded
    return is_row and dims.get("mat1") == 0 and scales == (1, 1)


@implements_per_sample_grads(
    torch.addmm,
    Tensor.addmm,
    weights={"input": (), "mat2": ("mat1",)},
    check=_is_affine,
    casts_under_autocast=True,
)
def addmm(
    grad_output: Tensor,  # (n, t, o)
    input: Tensor,  # (o,)
    mat1: Tensor,  # (n, t, i)
    mat2: Tensor,  # (i, o)
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Gradients:
    """∂W_n = Σ_t x[n,t] ⊗ g[n,t],  ∂b_n = Σ_t g[n,t]; GPT-2 writes its linear maps like this."""
    return {
        "input": lambda: PositionSum(grad_output),
        "mat2": lambda: OuterProduct(grad_output, mat1).transposed(),
    }


def terms_of(equation: str) -> tuple[list[str], str]:
    """Splits an equation into the terms of the operands and that of the result, implied or not."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = sorted(set(left) - {",", "."})
        right = "".join(x for x in letters if left.count(x) == 1)
        right = ("..." if "..." in left else "") + right
    return left.split(","), right


def letters_of(term: str, rank: int) -> list[str]:
    """Names each dimension of a term; dimensions of an ellipsis are numbered from the right."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f".{k}" for k in range(hidden, 0, -1)), *after]


@by_shape
def _is_product_with_weight(arguments: Mapping[str, Any], dims: Mapping[str, int]) -> bool:
    """Whether one of two operands carries samples, in a dimension that the other lacks."""
    equation, a, b = (arguments.get(name) for name in ("equation", "input", "other"))
    is_pair = isinstance(a, Tensor) and isinstance(b, Tensor) and arguments.get("third") is None
    if not isinstance(equation, str) or not is_pair or len(dims) != 1:
        return False
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    terms, result = terms_of(equation)
    if len(terms) != 2 or a.dtype != b.dtype:
        return False
    letters = [letters_of(term, t.dim()) for term, t in zip(terms, (a, b), strict=True)]
    hidden = max(sum(x[0] == "." for x in of) for of in letters)
    out = letters_of(result, len(result.replace("...", "")) + (hidden if "..." in result else 0))
    if any(len(set(of)) < len(of) for of in (*letters, out)):
        return False  # a diagonal
    (name,) = dims
    with_samples, weight = letters if name == "input" else letters[::-1]
    if with_samples[dims[name]] in weight or not set(weight) <= {*with_samples, *out}:
        return False
    sizes: dict[str, int] = {}
    named = zip((*letters[0], *letters[1]), (*a.shape, *b.shape), strict=True)
    return all(sizes.setdefault(letter, size) == size for letter, size in named)


@implements_per_sample_grads(
    torch.einsum,
    weights={"input": ("other",), "other": ("input",)},
    check=_is_product_with_weight,
    casts_under_autocast=True,
    symmetric=True,
)
def einsum(
    grad_output: Tensor,  # (n, *result)
    equation: str,
    input: Tensor,  # (n, *first term), or the weight
    other: Tensor,  # (n, *second term), or the weight
    third: Tensor | None = None,
) -> Gradients:
    """∂W_n[b,o,i] = Σ_t g[n,t,b,o] x[n,t,b,i]; b, o and i are letters of W, and t are those that it lacks."""
    (first, second), result = terms_of(equation)

    def gradient(x: Tensor, term: str, weight: Tensor, of_weight: str) -> Factor:
        letters = letters_of(of_weight, len(weight.shape))
        ours, out = letters_of(term, x.dim() - 1), letters_of(result, grad_output.dim() - 1)
        return _product(grad_output, out, x, ours, letters)

    return {
        "input": lambda: gradient(other, second, input, first),
        "other": lambda: gradient(input, first, other, second),
    }


def _product(
    g: Tensor, out: Sequence[str], x: Tensor, ours: Sequence[str], weight: Sequence[str]
) -> Factor:
    """Σ over the letters that the weight lacks of g ⊗ x; both have a sample axis in front."""
    alone = [1 + k for k, letter in enumerate(ours) if letter not in out and letter not in weight]
    if alone:
        x = x.sum(alone)
        ours = [letter for letter in ours if letter in out or letter in weight]
    positions = [letter for letter in ours if letter not in weight]
    both = [letter for letter in weight if letter in ours and letter in out]
    of_g = [letter for letter in weight if letter not in ours]
    of_x = [letter for letter in weight if letter not in out]

    def arranged(t: Tensor, letters: Sequence[str], groups: Sequence[Sequence[str]]) -> Tensor:
        """Permutes to (n, *groups); each group is one dimension."""
        order = [1 + letters.index(letter) for group in groups for letter in group]
        sizes = [prod(t.shape[1 + letters.index(letter)] for letter in group) for group in groups]
        return t.permute(0, *order).reshape(len(t), *sizes)

    sizes = {
        **dict(zip(out, g.shape[1:], strict=True)),
        **dict(zip(ours, x.shape[1:], strict=True)),
    }
    if not of_g and not of_x:
        shape = [sizes[letter] for letter in weight]
        g, x = (
            arranged(t, letters, (positions, weight)).unflatten(2, shape)
            if shape
            else arranged(t, letters, (positions,))
            for t, letters in ((g, out), (x, ours))
        )
        return ElementProduct(g, x)
    if both:
        g = arranged(g, out, (both, positions, of_g)).flatten(0, 1)
        x = arranged(x, ours, (both, positions, of_x)).flatten(0, 1)
        found: Factor = Stacked(OuterProduct(g, x), prod(sizes[letter] for letter in both))
    else:
        found = OuterProduct(
            arranged(g, out, (positions, of_g)), arranged(x, ours, (positions, of_x))
        )
    made = [*both, *of_g, *of_x]
    found = Rearranged(found, sizes=tuple(sizes[letter] for letter in made))
    return Rearranged(found, tuple(made.index(letter) for letter in weight))


@decomposes(torch.tensordot)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: Tensor | None = None) -> Any:
    """Decomposes into `einsum`."""
    if out is not None or isinstance(dims, Tensor) or a.dim() + b.dim() > len(_ALPHABET):
        return NotImplemented
    if isinstance(dims, int):
        summed: list[Sequence[int]] = [range(a.dim() - dims, a.dim()), range(dims)]
    else:
        summed = [[d] if isinstance(d, int) else d for d in dims]
    of_a, of_b = list(_ALPHABET[: a.dim()]), list(_ALPHABET[a.dim() : a.dim() + b.dim()])
    for k, m in zip(*summed, strict=True):
        of_b[m] = of_a[k]
    result = [x for x in of_a if x not in of_b] + [x for x in of_b if x not in of_a]
    return torch.einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(result)}", a, b)


@decomposes(torch.einsum)
def einsum_of_a_list(equation: Any, *operands: Any) -> Any:
    """Passes a list of operands one by one."""
    if len(operands) == 1 and isinstance(operands[0], Sequence):
        return torch.einsum(equation, *operands[0])
    return NotImplemented
