"""Draws random numbers by key, purpose and step: the same numbers whenever a step is repeated."""

from __future__ import annotations

import hashlib
import importlib
import math
import random
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from pergrad.errors import PrivacyError
from pergrad.runtime.caches import cached

__all__ = ["KEY_BYTES", "Stream", "Streams", "new_key", "seeded"]

KEY_BYTES = 32
_CPU = torch.device("cpu")
_WORDS = 624  # of the state of torch's Mersenne Twister
_STATE = slice(24, 24 + 8 * _WORDS)  # where the words lie in the bytes of a generator's state
_AVERAGED = 4  # normal numbers that make one of the cryptographic stream


def new_key(generator: torch.Generator | None) -> bytes:
    """Draws a key: from the system by default, from a generator for runs that must repeat."""
    if generator is None:
        return secrets.token_bytes(KEY_BYTES)
    if not isinstance(generator, torch.Generator):
        raise PrivacyError(
            f"generator must be a torch.Generator, got {generator!r}: torch.Generator().manual_seed(...)"
        )
    drawn = torch.randint(256, (KEY_BYTES,), generator=generator, device=generator.device)
    return bytes(drawn.tolist())


class Stream(Protocol):
    """A sequence of random numbers."""

    def uniforms(self, count: int) -> Tensor:
        """Returns (count,) numbers of [0, 1) in float64, 53 random bits each, on the CPU."""
        ...

    def integers(self, count: int) -> Tensor:
        """Returns (count,) integers of 62 random bits each, on the CPU."""
        ...

    def normals(self, like: Tensor) -> Tensor:
        """Returns standard normal numbers of the shape, dtype and device of `like`, which is real."""
        ...


class Streams:
    """Independent streams of one key: `streams("noise", 7)` is always the same one.

    Streams of different purposes or numbers share nothing, so that nothing has to be remembered of the
    numbers drawn so far: the state of a run is its key and the number of its step.
    """

    def __init__(self, key: bytes, *, cryptographic: bool = False) -> None:
        self._key = key
        self.cryptographic = cryptographic
        if cryptographic:
            _chacha20()  # fail early

    def __call__(self, purpose: str, number: int = 0) -> Stream:
        name = self._named(purpose, number)
        if self.cryptographic:
            return _ChaCha(hashlib.sha256(name).digest())
        return _Torch(name)

    def seed(self, purpose: str, number: int = 0, *, count: int) -> bytes:
        return hashlib.shake_256(self._named(purpose, number)).digest(count)

    def _named(self, purpose: str, number: int) -> bytes:
        return self._key + f"{purpose}\0{number}\0".encode()


class _Torch:
    """torch's own generators, on the device of the numbers."""

    def __init__(self, name: bytes) -> None:
        self._name = name
        self._generators: dict[torch.device, torch.Generator] = {}

    def uniforms(self, count: int) -> Tensor:
        generator = self._generator(torch.device("cpu"))
        return torch.rand(count, dtype=torch.float64, generator=generator)

    def integers(self, count: int) -> Tensor:
        generator = self._generator(torch.device("cpu"))
        return torch.randint(1 << 62, (count,), generator=generator)

    def normals(self, like: Tensor) -> Tensor:
        device = like.device if like.device.type == "cuda" else torch.device("cpu")
        noise = torch.empty(like.shape, dtype=like.dtype, device=device)
        return noise.normal_(generator=self._generator(device)).to(like.device)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            name = self._name + str(device.type).encode()
            generator = torch.Generator(device)
            if device.type == "cpu":
                generator.set_state(_twister(hashlib.shake_256(name).digest(4 * _WORDS)))
            else:  # Philox takes all 64 bits
                seed = hashlib.shake_256(name).digest(8)
                generator.manual_seed(int.from_bytes(seed, "little"))
            self._generators[device] = generator
        return self._generators[device]


def _twister(words: bytes) -> Tensor:
    """Builds the state of a Mersenne Twister from 624 random words.

    `manual_seed` would use 32 bits only: among a hundred thousand steps, two would share their noise.
    """
    state = _template().clone()
    numbers = torch.frombuffer(bytearray(words), dtype=torch.int32).long() & 0xFFFFFFFF
    state[_STATE] = numbers.view(torch.uint8)
    return state


@cached("the state of a generator that draws anew", most=1)
def _template() -> Tensor:
    """Returns the state of a generator that draws its words anew at its first number."""
    state = torch.Generator().manual_seed(1).get_state()
    # Moving the words of one generator into another's state must give all numbers of the first.
    for seed in (2, 2**31 + 3):  # its high bit is all that counts of the first word
        other, generator, moved = (
            torch.Generator().manual_seed(seed),
            torch.Generator(),
            state.clone(),
        )
        if moved.numel() < _STATE.stop:
            raise PrivacyError(_MOVED)
        moved[_STATE] = other.get_state()[_STATE]
        generator.set_state(moved)
        drawn, expected = (torch.rand(2 * _WORDS, generator=g) for g in (generator, other))
        if not torch.equal(drawn, expected):
            raise PrivacyError(_MOVED)
    return state


_MOVED = (
    "this torch lays out the state of its generator in another way, so noise cannot be drawn "
    "from a full key: pass cryptographic=True"
)


class _ChaCha:
    """ChaCha20 of the package `cryptography`: numbers that nobody can predict without the key."""

    def __init__(self, key: bytes) -> None:
        algorithms, cipher = _chacha20()
        # The key is of this stream alone, so its nonce may be zero.
        self._cipher = cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def uniforms(self, count: int) -> Tensor:
        return self._uniforms(count, _CPU)

    def _uniforms(self, count: int, device: torch.device) -> Tensor:
        bits = self._drawn(count, device) & ((1 << 53) - 1)
        return bits.double() * 2.0**-53

    def integers(self, count: int) -> Tensor:
        return self._drawn(count, _CPU) & ((1 << 62) - 1)

    def _drawn(self, count: int, device: torch.device) -> Tensor:
        """Returns integers of 64 random bits each."""
        if not count:
            return torch.zeros(0, dtype=torch.int64, device=device)
        drawn = bytearray(self._cipher.update(bytes(8 * count)))
        return torch.frombuffer(drawn, dtype=torch.int64).to(device)

    def normals(self, like: Tensor) -> Tensor:
        """Averages four normal numbers of 53 bits each, after Holohan and Braghin (2021)."""
        device = like.device if like.device.type == "cuda" else _CPU  # others may lack float64
        total = torch.zeros(like.numel(), dtype=torch.float64, device=device)
        half = (like.numel() + 1) // 2
        for _ in range(_AVERAGED):
            radius = (-2 * torch.log1p(-self._uniforms(half, device))).sqrt()
            angle = 2 * math.pi * self._uniforms(half, device)
            pairs = torch.cat([radius * angle.cos(), radius * angle.sin()])
            total += pairs[: like.numel()]
        total /= math.sqrt(_AVERAGED)
        return total.view(like.shape).to(like.device, like.dtype)


def _chacha20() -> tuple[Any, Any]:
    try:
        module = importlib.import_module("cryptography.hazmat.primitives.ciphers")
    except ImportError as error:
        raise PrivacyError(
            "cryptographic=True needs the package cryptography: pip install 'pergrad[private]'"
        ) from error
    return module.algorithms, module.Cipher


@contextmanager
def seeded(seed: bytes, devices: tuple[torch.device, ...] = ()) -> Iterator[None]:
    """Seeds the generators of torch, NumPy and Python within the block, and restores them afterwards."""
    of_torch, of_numpy, of_python = (int.from_bytes(seed[k : k + 4], "little") for k in (0, 4, 8))
    numpy = sys.modules.get("numpy")
    gpus = [device for device in devices if device.type == "cuda"]
    before = torch.get_rng_state(), random.getstate()
    on_gpus = [torch.cuda.get_rng_state(device) for device in gpus]
    in_numpy = None if numpy is None else numpy.random.get_state()
    torch.default_generator.manual_seed(of_torch)
    random.seed(of_python)
    for device in gpus:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(of_torch)
    if numpy is not None:
        numpy.random.seed(of_numpy)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        for device, state in zip(gpus, on_gpus, strict=True):
            torch.cuda.set_rng_state(state, device)
        if numpy is not None:
            numpy.random.set_state(in_numpy)
