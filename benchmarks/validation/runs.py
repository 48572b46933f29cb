"""Published runs, from runs/*.yaml: what ran, on what, how long it took, and where that is written.

Which rows fit constants and which are predicted blind is in the files. The rule: of the rows of a table, in
the order of print, the first fits, the second is blind, and so on. The only row of a table is blind.
A printed row with several figures counts as one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate, Recomputed
from penstock.planner.hardware import Cluster, read_cluster
from penstock.planner.practice import Axis, Practice, TokenCopies
from penstock.reading import parse_size
from penstock.yaml_reader import read_yaml

FOLDER = Path(__file__).with_name("tables")
Size = Annotated[float, BeforeValidator(lambda value: parse_size(value) if isinstance(value, str) else value)]
State = Literal["weights", "gradients", "optimizer", "gathered_gradients"]
Measure = Literal["seconds", "tokens_per_device", "tflops", "tflops_recomputed", "mfu"]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(Record):
    """A row of a published table.

    batch: rows of one pass of the pipeline; repeats: passes of a step, whose gradients add up
    fused: whether the ops between products are fused
    float8: whether products are in float8
    every_second: whether selective recomputation keeps every second product of a layer, the first included
    overlapped, copies, scattered, gathered_keys, sharded_edges: how its framework communicates (`Practice`)
    computing: the share of a device's processors that its exchanges leave to products and attention
    blocking: whether the host waits for each op (CUDA_LAUNCH_BLOCKING)
    first_more: whether the layers that are left over go to the first stages, not to those behind the first
    value: what was published, in the measure of its table; memory: bytes of the fullest device
    unpredicted: why the planner cannot predict it; empty where it can
    """

    name: str
    half: Literal["fit", "blind"]
    value: float
    memory: Size | None = None
    family: Literal["gpt", "llama", "deepseek", "kimi", "qwen3_moe"]
    vocabulary: int = 0
    layers: int = 0
    hidden: int = 0
    inner: int = 0
    heads: int = 0
    key_heads: int = 0
    length: int
    batch: int
    rows: int
    repeats: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recomputed: Recomputed = "none"
    sequence_parallel: bool = False
    reshard: bool = False
    every_second: bool = False
    float8: bool = False
    fused: bool = True
    overlapped: tuple[Axis, ...] = ()
    copies: TokenCopies | None = None
    scattered: bool = False
    gathered_keys: bool = False
    sharded_edges: bool = False
    computing: float = 1.0
    blocking: bool = False
    first_more: bool = False
    unpredicted: str = ""

    @property
    def model(self) -> tuple[Any, ...]:
        """Equal for runs of one model on one process: the vocabulary is sharded by tp."""
        shape = self.local_vocabulary, self.layers, self.hidden, self.inner, self.heads, self.key_heads
        return self.family, *shape, self.length if self.family == "gpt" else 0

    @property
    def local_vocabulary(self) -> int:
        """The entries of the vocabulary that a process computes.

        These runs shard it up to the loss. penstock gathers the logits, so the planner gets a model with
        the share of one process, and one entry more, which no tp divides.
        """
        return self.vocabulary if self.tp == 1 else self.vocabulary // self.tp + 1

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of each stage: as many for each, and one of those that are left over."""
        stages = self.pp * self.stages_per_rank
        if self.layers == 0 or stages == 1:
            return ()
        each, more = divmod(self.layers, stages)
        start = 0 if self.first_more else 1
        return tuple(each + (start <= stage < start + more) for stage in range(stages))

    @property
    def practice(self) -> Practice:
        return Practice(self.overlapped, self.copies, self.scattered, self.gathered_keys, self.sharded_edges)

    @property
    def candidate(self) -> Candidate:
        """As the planner names it. Products, and what is between them, are in half precision."""
        axes = Axes(
            dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp, ep=self.ep
        )
        several = (("stages_per_rank", self.stages_per_rank),) if self.stages_per_rank > 1 else ()
        return Candidate(
            self.pp,
            axes,
            self.schedule,
            several,
            self.rows,
            self.length,
            self.batch // (self.rows * axes.batch_parts),
            self.recomputed,
            split=self.split,
            precision="bfloat16",
            sequence_parallel=self.sequence_parallel,
            reshard=self.reshard,
            practice=self.practice,
        )


class Table(Record):
    """A published table.

    checked: where its figures were checked, and which could not be
    assumed: what the source leaves open
    constants: the set of constants that its fitting rows fit
    memory_of: what its memory counts; memory_more: what that counts beside tensors
    reserved: whether its memory is what the driver counts, with what allocators keep for later
    float32: the states that the runs keep in float32, which are predicted in half precision
    one_model: whether all rows are of one model, so that their order means something
    """

    source: str
    table: str
    date: str
    checked: str
    assumed: tuple[str, ...]
    cluster: str | dict[str, Any]
    constants: str
    measured: Measure
    memory_of: str = ""
    memory_more: Size = 0.0
    reserved: bool = False
    float32: tuple[State, ...] = ()
    one_model: bool = False
    runs: tuple[Run, ...]

    def hardware(self, run: Run) -> Cluster:
        """The cluster of a run, with as many hosts as it takes."""
        keys: Mapping[str, Any] = {"host": self.cluster} if isinstance(self.cluster, str) else self.cluster
        devices = read_cluster({"hosts": 1, **keys}).devices
        return read_cluster({**keys, "hosts": -(-run.candidate.devices // devices)})


def tables() -> dict[str, Table]:
    """The published tables, by the names of their files."""
    return {path.stem: read_table(path) for path in sorted(FOLDER.glob("*.yaml"))}


def read_table(path: Path) -> Table:
    tree = read_yaml(path, "table")
    defaults = tree.pop("defaults")
    return Table.model_validate({**tree, "runs": [{**defaults, **run} for run in tree["runs"]]})
