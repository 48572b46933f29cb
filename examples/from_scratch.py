"""1F1B by hand, with nothing but torch.distributed: what the library does, in a form to read in one sitting.

    torchrun --nproc-per-node 3 examples/from_scratch.py

A pipeline gives each process (a rank) a slice of the layers, its stage. A batch is cut into microbatches.
What a stage computes travels to the next rank, and its gradient travels back:

    rank 0 | F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3      F: forward of a microbatch
    rank 1 | .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .       B: its backward, about twice as long
    rank 2 | .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .       .: the bubble, in which a rank waits

Most first attempts fail in three ways: gradients end at what was received (1), ranks wait for each other for
ever (2), the loss has the wrong scale (3). The comments with these numbers say why it goes right here.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, WIDTH, ROWS, MICROBATCHES, STEPS = 7, 16, 12, 4, 20


def own_layers(rank: int, ranks: int) -> range:
    """The numbers of a rank's layers: an even share; the first ranks get the remainder, one layer each."""
    share, rest = divmod(LAYERS, ranks)
    start = rank * share + min(rank, rest)
    return range(start, start + share + (rank < rest))


def make_stage(rank: int, ranks: int) -> nn.Module:
    """The layers of one rank; no rank ever holds the others. A layer's seed is its number, for any split."""
    layers = []
    for number in own_layers(rank, ranks):
        torch.manual_seed(number)
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers)


class Stage:
    """A rank's layers, and its live microbatches: those between their forward and their backward."""

    def __init__(self, module: nn.Module, rank: int, ranks: int, inputs: Tensor, targets: Tensor) -> None:
        self.module, self.rank, self.ranks = module, rank, ranks
        self.inputs, self.targets = inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES)
        self.live: dict[int, tuple[Tensor, Tensor]] = {}
        self.sends: list[tuple[dist.Work | None, Tensor]] = []
        self.loss, self.most_live = 0.0, 0

    def forward(self, number: int) -> None:
        if self.rank == 0:
            x = self.inputs[number]
        else:
            x = torch.empty(len(self.inputs[number]), WIDTH)
            dist.recv(x, self.rank - 1)
            x.requires_grad_()  # (1) a received tensor is a leaf: without this the backward gives it no .grad
        y = self.module(x)
        if self.rank == self.ranks - 1:
            # (3) a sum over these rows, divided by the rows of the whole batch: added over the microbatches,
            # loss and gradients are those of one process, also where microbatches differ
            y = F.mse_loss(y, self.targets[number], reduction="sum") / (ROWS * WIDTH)
            self.loss += y.item()
        else:
            self.send(y.detach(), self.rank + 1)
        self.live[number] = x, y  # y holds the graph, and so every activation of this microbatch
        self.most_live = max(self.most_live, len(self.live))

    def backward(self, number: int) -> None:
        x, y = self.live.pop(number)
        if self.rank == self.ranks - 1:
            y.backward()  # type: ignore[no-untyped-call]
        else:
            gradient = torch.empty_like(y)
            dist.recv(gradient, self.rank + 1)
            y.backward(gradient)  # type: ignore[no-untyped-call]  # goes on where the next rank's ended
        if self.rank > 0:
            self.send(x.grad, self.rank - 1)

    def send(self, tensor: Tensor | None, target: int) -> None:
        # (2) a send must not wait for its receiver: two neighbours may both send first, one its output and
        # the other its gradient. The tensor must live until its send has ended.
        assert tensor is not None
        self.sends.append((dist.isend(tensor, target), tensor))

    def step(self) -> float:
        """Every microbatch forward and backward once. Returns the loss on the last rank, else 0."""
        warm_up = min(self.ranks - 1 - self.rank, MICROBATCHES)  # the last rank starts its backwards at once
        for number in range(warm_up):
            self.forward(number)
        for number in range(MICROBATCHES - warm_up):  # steady: at most `ranks - rank` microbatches are live
            self.forward(warm_up + number)
            self.backward(number)
        for number in range(MICROBATCHES - warm_up, MICROBATCHES):  # cool-down
            self.backward(number)
        for send, _ in self.sends:
            if send is not None:
                send.wait()
        return self.loss


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Rows and targets; every rank makes the same ones."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.roll(1, dims=1).tanh()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    module = make_stage(rank := dist.get_rank(), ranks := dist.get_world_size())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for number in range(1, STEPS + 1):
        stage = Stage(module, rank, ranks, *batch(number))
        loss = stage.step()
        optimizer.step()  # each rank updates its own layers; nothing is exchanged
        optimizer.zero_grad()
        if rank == ranks - 1:
            print(f"step {number}: loss {loss:.4f}, at most {stage.most_live} microbatches live on this rank")
    dist.destroy_process_group()
