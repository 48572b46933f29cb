"""A model of one's own in a pipeline: a small decoder, of which each rank builds its own stage.

A stage is a module, here `Chunk`, made from a StageInfo: which stage of how many. It builds only its own
layers. A stage sends what its forward returns to the next stage's forward:

    tokens -> embedding, blocks -> {hidden, auxiliary, documents} -> blocks -> ... -> blocks, norm, head

The task: rows of documents that count up, "by 2: 7 9 11 13 15, by 3: 1 4 7 10 13". A number follows from the
one before it and from the step that its own document begins with.

    python examples/own_model.py --ranks 3
    torchrun --nproc-per-node 3 examples/own_model.py --schedule zb_v
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline
from penstock.batch.shapes import Microbatch
from penstock.models.stage import StageInfo, distribute_layers

LAYERS, WIDTH, HEADS = 6, 32, 2
NUMBERS, STEPS, DOCUMENT = 16, 3, 6  # a document: its step, a number to start from, and four that follow
VOCABULARY = NUMBERS + STEPS  # token NUMBERS + i means "by i + 1"
IGNORED = -100  # the label that cross_entropy leaves out
SIZES = [(8, 3), (16, 1), (4, 5), (12, 2)]  # rows and documents in a row of each microbatch: any will do


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.feed(self.norm2(hidden))
        return result


class Chunk(nn.Module):
    """One stage. Each part has a seed of its own: the same initial values however the model is cut."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.info = info
        if info.is_first:
            torch.manual_seed(LAYERS)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        # named by their numbers in the whole model, so that parameters are called the same in every cut
        self.layers = nn.ModuleDict()
        # embedding and head count as a layer each: their stages get fewer blocks
        for layer in distribute_layers(LAYERS, info, before=1, after=1):
            torch.manual_seed(layer)
            self.layers[str(layer)] = Block()
        if info.is_last:
            torch.manual_seed(LAYERS + 1)
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        tokens: Tensor,  # an entry of the batch: any stage may name the entries that it needs
        hidden: Tensor | None = None,  # this and the next two come from the stage before, by name
        auxiliary: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if hidden is None or auxiliary is None or documents is None:  # on the first stage
            hidden = self.embedding(tokens)
            auxiliary = hidden.new_zeros(())
            documents = (tokens >= NUMBERS).cumsum(1)
        causal = torch.ones_like(documents[0, :, None] == documents[0]).tril()
        mask = (documents[:, None, :, None] == documents[:, None, None, :]) & causal
        for layer in self.layers.values():
            hidden = layer(hidden, mask)
            auxiliary = auxiliary + hidden.square().mean()  # a term of the loss that all stages add to
        if self.info.is_last:
            return {"logits": self.head(self.norm(hidden)), "auxiliary": auxiliary}
        return {"hidden": hidden, "auxiliary": auxiliary, "documents": documents}

    # Optional. Without these two methods each rank builds the other stages too, on the meta device, where
    # tensors have no values, and runs them there once for each new shape to infer the shapes it receives.

    def infer_outputs(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """The shapes and dtypes of the tensors sent to the next stage; nothing is computed."""
        shape = microbatch["tokens"].shape
        return {
            "hidden": torch.empty(*shape, WIDTH),
            "auxiliary": torch.empty(()),
            "documents": torch.empty(shape, dtype=torch.long),  # integers: no gradient comes back
        }

    infer_inputs = infer_outputs  # here every edge looks the same


class MeanOverLabels:
    """The loss of a step is the sum of the totals over the sum of the weights, however labels are spread."""

    def weight(self, microbatch: Microbatch) -> int:
        return int((microbatch["labels"] != IGNORED).sum())

    def total(self, output: dict[str, Tensor], microbatch: Microbatch) -> Tensor:
        logits, labels = output["logits"].flatten(0, 1), microbatch["labels"].flatten()
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return total + 1e-3 * output["auxiliary"] * self.weight(microbatch)


def draw(seed: int) -> list[dict[str, Tensor]]:
    """A step's microbatches, which must be the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    microbatches = []
    for rows, count in SIZES:
        step = torch.randint(STEPS, (rows, count, 1), generator=generator)
        start = torch.randint(NUMBERS, (rows, count, 1), generator=generator)
        numbers = (start + (step + 1) * torch.arange(DOCUMENT - 1)) % NUMBERS
        documents = torch.cat([NUMBERS + step, numbers], dim=2)
        labels = documents.roll(-1, dims=2)
        labels[:, :, 0] = labels[:, :, -1] = IGNORED  # the start, and the next document, are not predictable
        microbatches.append({"tokens": documents.flatten(1), "labels": labels.flatten(1)})
    return microbatches


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small decoder of one's own in a pipeline.")
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", "3")))
    parser.add_argument("--schedule", default="1f1b", help="e.g. gpipe, interleaved_1f1b, zb_v, dualpipe_v")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing by more
    # Without torchrun this process holds all ranks, which is good for debugging. Under torchrun it is one.
    pipe = Pipeline.from_provider(
        Chunk,
        schedule=options.schedule,
        ranks=options.ranks,
        microbatches=len(SIZES),
        loss_fn=MeanOverLabels(),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)  # of this process's stages
    for step in range(options.steps):
        loss = pipe.step(draw(seed=step)).loss  # the same number on every rank
        optimizer.step()
        optimizer.zero_grad()
        if pipe.processes.index == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}")
    unseen = draw(seed=options.steps)
    # by microbatch, on the last stage's rank; empty on the others, which print nothing
    predicted = pipe.infer(unseen, collect=lambda output, number: output["logits"].argmax(-1))
    right = [(predicted[i] == unseen[i]["labels"])[unseen[i]["labels"] != IGNORED] for i in predicted]
    if predicted:
        step, start, *_ = unseen[0]["tokens"][0].tolist()
        print(f"by {step - NUMBERS + 1} from {start}: {predicted[0][0, 1 : DOCUMENT - 1].tolist()}")
        print(f"{torch.cat(right).float().mean():.0%} of the unseen numbers are right")
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
