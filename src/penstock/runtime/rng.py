"""Random numbers within a step, such as dropout, from seeds that do not depend on the mesh.

The random numbers of a layer depend on the step, on the content of the microbatch and on the layer's position
in the model; not on the ranks, nor on the order in which they run microbatches. So the same microbatches give
the same loss on one process and on many:

    seed of the step --content--> seed of a microbatch --stage or layer--> seed of the generator

A checkpointed layer that runs again draws the same numbers: torch restores the generator, and its seed
identifies the microbatch. The step restores the generators too, after it has drawn one number from each
rank's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.batch.microbatches import checksums, named_tensors
from penstock.batch.shapes import Microbatch, microbatch_key
from penstock.private import DropoutNd
from penstock.runtime.around import around
from penstock.runtime.stage_part import Forward, StagePart

_MASK = (1 << 63) - 1
_ODD = 0x1E3779B97F4A7C15


def dropouts(module: nn.Module) -> Iterator[tuple[str, str, float]]:
    """Modules with dropout: name, the attribute with the probability, and the probability, above 0.

    Recognised are torch's classes, and attributes with "drop" in their name. Other random modules are missed.
    """
    for name, part in module.named_modules():
        if isinstance(part, DropoutNd):
            if part.p > 0:
                yield name, "p", part.p
            continue
        for key, value in vars(part).items():
            if "drop" in key.lower() and type(value) is float and value > 0:
                yield name, key, value


class StageRNG(StagePart):
    """Seeds the generator of one stage where a forward begins, and where one of its modules is called.

    Args:
        stage: its number within its copy of the model.
        modules: modules to seed, each with its name or index in the whole model.
    """

    def __init__(self, stage: int, device: torch.device, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.stage = stage
        self.seeds: dict[int, int] = {}  # of a step's microbatches, by their id
        self.generator = generator_of(device)
        self._origins: dict[int, int] = {}  # seed of the generator -> seed of the microbatch
        for name, module in modules:
            if vars(module).get("_rng") is not self:  # a module may occur twice
                around(module, __call__=_seeded)
                vars(module).update(_rng=self, _rng_name=name)

    def before_forward(self, index: int, microbatch: Microbatch, how: Forward) -> None:
        self._seed(self.seeds.get(id(microbatch)), f"stage {self.stage}")

    def enter(self, name: str) -> None:
        """Seed for a call of module `name`.

        The generator's seed identifies the microbatch. The latest forward does not: a backward may run a
        module of any microbatch again, and torch restores the generator for that.
        """
        self._seed(self._origins.get(self.generator.initial_seed()), name)

    def end(self) -> None:
        self.seeds, self._origins = {}, {}

    def _seed(self, seed: int | None, name: str) -> None:
        if seed is not None:
            mixed = mix(seed, name)
            self._origins[mixed] = seed
            self.generator.manual_seed(mixed)


def _seeded(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The outermost function around a module's call, as compilers skip generators."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            module._rng.enter(module._rng_name)
        return plain(module, *args, **kwargs)

    return call


def mix(seed: int, text: str) -> int:
    """A seed that depends on all bits of both."""
    for byte in text.encode():
        seed = (seed ^ byte) * _ODD & _MASK
        seed ^= seed >> 29
    return seed


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed above 0 from torch's generator; it fits into a float64."""
    return int(torch.randint(1, 1 << 53, (), generator=generator, device="cpu"))


def next_seed() -> int:
    """The seed that `draw_seed` will return; does not advance the generator."""
    return draw_seed(torch.default_generator.clone_state())


@contextmanager
def seeded_step(
    rngs: Sequence[StageRNG], seed: int, full: Sequence[Microbatch], local: Sequence[Microbatch]
) -> Iterator[None]:
    """Seed a step on the microbatches `local`, this rank's parts of `full`, by the contents of `full`."""
    seeds = {id(part): mix(seed, content) for part, content in zip(local, _contents(full), strict=True)}
    generators = {id(rng.generator): rng.generator for rng in rngs}
    before = [(generator, generator.get_state()) for generator in generators.values()]
    for rng in rngs:
        rng.seeds = seeds
    try:
        yield
    finally:
        for rng in rngs:
            rng.end()
        for generator, state in before:
            generator.set_state(state)


def _contents(microbatches: Sequence[Microbatch]) -> Iterator[str]:
    """A digest of each microbatch. Waits for a GPU once."""
    named = [list(named_tensors(microbatch)) for microbatch in microbatches]
    sums = iter(checksums([tensor for entries in named for _, tensor in entries]))
    for microbatch, entries in zip(microbatches, named, strict=True):
        content = microbatch_key(microbatch), [(name, next(sums)) for name, _ in entries]
        yield str(zlib.crc32(repr(content).encode()))


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that modules on `device` draw from."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
