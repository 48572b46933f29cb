"""What is drawn at random within a step, such as dropout, from seeds that do not hang on the mesh.

Each layer draws what hangs on the step, on the microbatch's content and on the layer's place in the whole
model: not on the ranks, nor on the order in which they run microbatches. So the same microbatches give the
same loss on one process and on many. What a checkpointed layer runs again draws the same, as torch sees to
it: it puts back the generator as it was, whose seed tells a layer that is called again there which
microbatch it belongs to. And the step leaves the generators as it found them, but for one number, on every
rank alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from penstock.batch.microbatches import checksums, leaves_of
from penstock.batch.shapes import Microbatch, microbatch_key

_MASK = (1 << 63) - 1
_ODD = 0x1E3779B97F4A7C15


def dropouts(module: nn.Module) -> Iterator[tuple[str, str, float]]:
    """The modules that may drop what they compute, with what they call its chance, and that, above 0.

    As far as they tell: a module of torch's, or a number that is named so. What else draws is not found.
    """
    for name, part in module.named_modules():
        if isinstance(part, _DropoutNd):
            if part.p > 0:
                yield name, "p", part.p
            continue
        for key, value in vars(part).items():
            if "drop" in key.lower() and type(value) is float and value > 0:
                yield name, key, value


class StageRNG:
    """Of one stage: seeds its generator where a forward begins, and one of its parts.

    stage: its number within its copy of the model; parts: modules with their places in the whole model
    """

    def __init__(self, stage: int, device: torch.device, parts: Iterable[tuple[str, nn.Module]]) -> None:
        self.stage = stage
        self.seeds: dict[int, int] = {}  # of a step's microbatches, by their id
        self._generator = _generator(device)
        self._origins: dict[int, int] = {}  # of a seed that the generator was given, the microbatch's
        made: dict[type[nn.Module], type[nn.Module]] = {}
        for place, module in parts:
            self._watch(module, place, made)

    def begin(self, microbatch: Microbatch) -> None:
        self._give(self.seeds.get(id(microbatch)), f"stage {self.stage}")

    def at(self, place: str) -> None:
        """Not by the forward that began last: a backward may call it again, of any microbatch, and torch has
        put back what the generator was then."""
        self._give(self._origins.get(self._generator.initial_seed()), place)

    def end(self) -> None:
        self.seeds, self._origins = {}, {}

    def _give(self, seed: int | None, place: str) -> None:
        if seed is not None:
            given = mixed(seed, place)
            self._origins[given] = seed
            self._generator.manual_seed(given)

    def _watch(self, module: nn.Module, place: str, made: dict[type[nn.Module], type[nn.Module]]) -> None:
        own = type(module)
        if own in made.values():  # one that stands in two places
            return
        if own not in made:
            made[own] = type(own.__name__, (_Seeding, own), {"__module__": own.__module__})
        module.__class__ = made[own]
        vars(module).update(_chance=self, _chance_place=place)


class _Seeding(nn.Module):
    """Mixed into a class: around all else that a call does, as compilers know nothing of generators."""

    _chance: StageRNG
    _chance_place: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._chance.at(self._chance_place)
        return super().__call__(*args, **kwargs)


class Seeded:
    """Runs a stage's part of the model as `call` does."""

    def __init__(self, call: Any, chance: StageRNG) -> None:
        self._call, self._chance = call, chance

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        self._chance.begin(microbatch)
        return self._call(received, microbatch)


def mixed(seed: int, text: str) -> int:
    """Another seed, that hangs on all bits of both."""
    for byte in text.encode():
        seed = (seed ^ byte) * _ODD & _MASK
        seed ^= seed >> 29
    return seed


def drawn(generator: torch.Generator | None = None) -> int:
    """A number above 0 from torch's generator, which goes on by it. A float64 holds it."""
    return int(torch.randint(1, 1 << 53, (), generator=generator, device="cpu"))


def foreseen() -> int:
    """What `drawn` is about to give."""
    return drawn(torch.default_generator.clone_state())


@contextmanager
def seeded(
    chances: Sequence[StageRNG], seed: int, whole: Sequence[Microbatch], own: Sequence[Microbatch]
) -> Iterator[None]:
    """A step on the microbatches `own`, this rank's parts of `whole`, whose contents tell their seeds."""
    seeds = {id(part): mixed(seed, content) for part, content in zip(own, _contents(whole), strict=True)}
    generators = {id(chance._generator): chance._generator for chance in chances}
    before = [(generator, generator.get_state()) for generator in generators.values()]
    for chance in chances:
        chance.seeds = seeds
    try:
        yield
    finally:
        for chance in chances:
            chance.end()
        for generator, state in before:
            generator.set_state(state)


def _contents(microbatches: Sequence[Microbatch]) -> Iterator[str]:
    """What each holds, in short. A GPU is waited for once."""
    named = [list(leaves_of(microbatch)) for microbatch in microbatches]
    sums = iter(checksums([leaf for entries in named for _, leaf in entries]))
    for microbatch, entries in zip(microbatches, named, strict=True):
        told = microbatch_key(microbatch), [(name, next(sums)) for name, _ in entries]
        yield str(zlib.crc32(repr(told).encode()))


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
