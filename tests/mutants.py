"""Break the code in one place at a time and see whether the tests notice: `make mutants`.

Each mutant is a small change of a line that matters. The named tests run on a copy of the tree that has this
change alone; a mutant that they do not notice "survives", and means that a test is missing.

    python tests/mutants.py              all of them
    python tests/mutants.py verify 7     those of files whose path contains "verify", and number 7
    python tests/mutants.py --check      only: does each snippet occur exactly once?
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("src", "tests", "examples", "docs", "configs", "pyproject.toml")
LIMIT = 600  # seconds for the tests of one mutant


class Mutant(NamedTuple):
    """file: below src/penstock; tests: below tests, as pytest takes them, apart by spaces"""

    file: str
    snippet: str
    replacement: str
    tests: str


EVERY = "test_every_schedule.py"
EXECUTOR, PLAN = "runtime/executor.py", "runtime/plan.py"
CHAT, RECORD = "train/encoding/chat.py", "train/encoding/record.py"
OF_RECORD = "train/encoding/test_record.py"
OFFLOAD, OFFLOADED = "schedule/offload.py", "runtime/device/offload.py"
OF_OFFLOAD, OF_OFFLOADING = (
    "schedule/test_offload.py",
    "runtime/device/test_offload.py models/test_activation_offloading.py",
)
STEP_MEMORY, STAGE = "runtime/step_memory.py", "runtime/stage.py"
SHARED = "pipeline/steps/shared_gradients.py"
VERIFY, SIMULATE = "schedule/verify.py", "schedule/simulation/simulate.py"
ARRAYS, ORDER, OPS_OF = "schedule/op_arrays.py", "schedule/order.py", "schedule/ops.py"
BACKWARD, DEFERRED = "runtime/split_backward/backward.py", "runtime/split_backward/deferred.py"
RECORDING, LOSS = "runtime/split_backward/recording.py", "batch/loss.py"
PLACEMENT, OF_PLACEMENT = "batch/placement.py", "batch/test_placement.py"
CASTS, OF_AUTOCAST = "runtime/split_backward/casts.py", "pipeline/test_autocast.py"
REDUCTIONS = "parallel/reductions.py"
OPTIMIZER_STEP, OF_OPTIMIZER_STEP = (
    "pipeline/steps/optimizer_step.py",
    "pipeline/steps/test_optimizer_step.py",
)
OF_VERIFY = "schedule/test_verify.py schedule/test_properties.py"
OF_ARRAYS = "schedule/test_op_arrays.py"
TURNS, OF_TURNS = "schedule/turns.py", "schedule/test_turns.py"
SAMPLE, OF_SAMPLE = "schedule/simulation/sample.py", "schedule/simulation/test_sample.py"
OF_SIMULATE = "schedule/simulation/test_simulate.py schedule/simulation/test_costs.py"
OF_SPLIT = "runtime/split_backward"
OF_RANKS = "runtime/test_ranks.py"
OF_SHARED = "pipeline/steps/test_shared_gradients.py"

MTP, OF_MTP = "models/mtp.py", "pipeline/test_mtp.py"
MASKS, OF_READS = "models/huggingface/masks.py", "models/huggingface/test_masks.py"
OF_READING = "models/weights/test_reading.py"
SCHEDULES = "pipeline/steps/schedules.py"
OF_COUNTS = "pipeline/steps/test_schedules.py pipeline/steps/test_split_batch.py"
OF_NCCL = "parallel/test_nccl.py parallel/test_world.py runtime/transport/test_groups.py"
STREAMED, OF_STREAMED = "runtime/transport/stream_channels.py", "runtime/transport/test_stream_channels.py"

OF_EVERY_STAGE, OF_LENGTHS = "runtime/test_shared_weights.py", "train/data/test_document_length.py"

MUTANTS = [
    # ---- options of the seeds
    Mutant(
        "pipeline/building/provided_stages.py",
        " for stage, names in copies.items() if stage % depth}",
        " for stage, names in ()}",
        OF_EVERY_STAGE,
    ),
    Mutant("pipeline/building/provided_stages.py", "modules, summed))", "modules))", OF_EVERY_STAGE),
    Mutant(
        "pipeline/options.py",
        "splits=bool(schedule.split)",
        "splits=False",
        "pipeline/building/test_compiling.py",
    ),
    Mutant(
        "pipeline/building/experts.py",
        "        model.set_experts_implementation(name)\n",
        "        pass\n",
        "pipeline/building/test_experts.py",
    ),
    Mutant("train/data/rows.py", "min(end, bounds[-2] + longest)", "end", OF_LENGTHS),
    Mutant(
        "train/data/streaming.py",
        "size = min(self._open[0].left, self._options.longest)",
        "size = min(self._open[0].left, self._options.length)",
        OF_LENGTHS,
    ),
    Mutant(
        "train/encoding/record.py", "return said[index]", "return said[0]", "train/encoding/test_columns.py"
    ),
    # ---- the reader of chats: nothing of a record is lost
    Mutant(
        RECORD,
        "refuse_keys(row.keys() - {*known, *seen, *_OF_TEMPLATES}, of_messages, self.ignored)",
        "pass",
        OF_RECORD,
    ),
    Mutant(RECORD, '"bard": "assistant",', "", OF_RECORD),
    Mutant(
        RECORD,
        "            trained.append(_trained(at, message))\n",
        "            trained.append(None)\n",
        OF_RECORD,
    ),
    Mutant(RECORD, "if not self._text_arguments:", "if True:", OF_RECORD),
    Mutant(CHAT, "            counted[begin:end] = False\n", "            pass\n", OF_RECORD),
    Mutant(CHAT, "        _check_written(chat, text)\n", "", OF_RECORD),
    Mutant(CHAT, "        self._check_short(chat)\n", "", OF_RECORD),
    Mutant(CHAT, "        at = at if system else start\n", "", OF_RECORD),
    Mutant(CHAT, "start = 0 if system else at", "start = at", OF_RECORD),
    Mutant(CHAT, "last=index in chat.turns[-1:]", "last=True", OF_RECORD),
    Mutant(CHAT, "            self._check_tools(chat, text)\n", "            pass\n", OF_RECORD),
    # ---- the optimizer's step in a step
    Mutant(
        OPTIMIZER_STEP,
        "                self._model._clip(norm, self._max_norm)\n",
        "                pass\n",
        OF_OPTIMIZER_STEP,
    ),
    Mutant(OPTIMIZER_STEP, "if math.isfinite(norm)", "if True", OF_OPTIMIZER_STEP),
    Mutant(OPTIMIZER_STEP, " and loss <= self._max_loss", "", OF_OPTIMIZER_STEP),
    # ---- hosts that run ahead of their GPU
    Mutant(
        "runtime/recorder.py",
        "            self._anchor = self._stream.anchor()\n",
        "",
        "runtime/test_recorder.py",
    ),
    Mutant(
        "runtime/recorder.py",
        "if start >= launched + self._offset:",
        "if start >= launched:",
        "runtime/test_recorder.py",
    ),
    Mutant(
        "schedule/simulation/costs.py",
        "min(median(times), device.get(of, inf))",
        "median(times)",
        "runtime/device/test_host_bound.py",
    ),
    Mutant(
        "models/weights/reading.py", "                reach(copied)\n", "                pass\n", OF_READING
    ),
    Mutant("models/weights/reading.py", "1 - self._turn", "self._turn", OF_READING),
    Mutant(
        "checkpoint/save_load.py",
        "one.register_step_pre_hook(copies.before_step)",
        "one.register_step_pre_hook(lambda *_: None)",
        "checkpoint/test_save_load.py",
    ),
    Mutant(
        "pipeline/model_files.py",
        "            self.under_way.wait()\n",
        "            pass\n",
        "checkpoint/test_save_load.py",
    ),
    Mutant(
        MASKS,
        "            return to_device(answer",
        "            return ask(tensor) or to_device(found",
        OF_READS,
    ),
    Mutant("models/huggingface/stages.py", " and not self._edits", "", OF_READS),
    Mutant(MASKS, "        if self._asked > self._constant:\n", "        if False:\n", OF_READS),
    Mutant(MASKS, "return 0 if looking.depends else looking.count", "return looking.count", OF_READS),
    Mutant(LOSS, "self.weight(host_values(microbatch))", "self.weight(microbatch)", OF_READS),
    # ---- messages on streams
    Mutant(STREAMED, "        self._connect(groups, channels)\n", "", OF_STREAMED),
    Mutant(
        STREAMED,
        "                work.wait()\n        except",
        "                pass\n        except",
        OF_STREAMED,
    ),
    Mutant(
        STREAMED,
        "                work.wait()\n        except",
        "                work.wait(self._limit)\n        except",
        OF_STREAMED,
    ),
    Mutant(
        "runtime/transport/point_to_point.py",
        'it has not begun"\n        for work in self._works:\n            work.wait()',
        'it has not begun"\n        for work in self._works:\n            work.wait(timeout)',
        OF_STREAMED,
    ),
    Mutant(STREAMED, "works, tensors, nbytes)", "works, (), nbytes)", OF_STREAMED),
    Mutant(STREAMED, "len(self._freed) > _AHEAD", "False", OF_STREAMED),
    Mutant(STREAMED, "if watch.broken:", "if False:", OF_STREAMED),
    Mutant("runtime/transport/groups.py", "        group.abort()\n", "        pass\n", OF_STREAMED),
    Mutant("parallel/world.py", 'backend == "nccl" and fits_batches(schedule)', "False", OF_STREAMED),
    Mutant(
        "runtime/transport/distributed.py",
        "work.wait() if on_stream else work.wait(self._limit)",
        "work.wait(self._limit)",
        OF_STREAMED,
    ),
    Mutant(
        "runtime/transport/distributed.py",
        "        if on_stream:  # once",
        "        if False:  #",
        OF_STREAMED,
    ),
    Mutant("runtime/ranks.py", "        if self._on_stream:  #", "        if False:  #", OF_STREAMED),
    Mutant("runtime/ranks.py", "raise first from failure", "return result", OF_RANKS),
    Mutant("runtime/ranks.py", "if len(set(calls)) > 1:", "if False:", OF_RANKS),
    Mutant("runtime/ranks.py", "        except PeerError:\n            raise\n", "", OF_RANKS),
    Mutant("runtime/ranks.py", "self.mesh.same(name)", "pass", "pipeline/test_collective.py"),
    Mutant(
        "parallel/nccl.py", "    if connections >= streams:\n        return\n", "    return\n", OF_STREAMED
    ),
    Mutant("parallel/mesh.py", "else backend_of_gpus(attempt, rank, world, device)", 'else "nccl"', OF_NCCL),
    Mutant("runtime/transport/channels.py", '"pp messages", messages=True)', '"pp messages")', OF_NCCL),
    Mutant("runtime/health/watch.py", "            free()\n", "", OF_STREAMED),
    # ---- the parts of a step and of a stage
    Mutant(
        "pipeline/steps/runner.py",
        "                part.failed()\n",
        "                pass\n",
        "pipeline/steps/test_step.py",
    ),
    Mutant(
        "pipeline/steps/runner.py",
        "            self._report(step, any(part.changed for part in parts))\n",
        "            self._report(step, False)\n",
        OF_SHARED,
    ),
    Mutant(
        "runtime/stage_part.py",
        "if getattr(type(part), method) is not plain",
        "",
        "runtime/test_stage_part.py",
    ),
    Mutant(STAGE, '            end(number, "I")\n', "            pass\n", "runtime/test_stage_part.py"),
    # ---- executor
    Mutant(EXECUTOR, "self.inbox.pop(takes)", "self.inbox[takes]", f"runtime/test_executor.py {EVERY}"),
    Mutant(
        EXECUTOR,
        "        recorder.add(op, takes, start, recorder.now())",
        "        recorder.add(op, takes, start, start)",
        "runtime/test_executor.py runtime/transport/test_slow_network.py",
    ),
    Mutant(EXECUTOR, "        self._end_step(step)\n", "", EVERY),
    Mutant(EXECUTOR, "        self.inbox.clear()\n", "", "runtime/test_executor.py"),
    Mutant(EXECUTOR, "1 / step.weight", "1.0", EVERY),
    Mutant(EXECUTOR, "list(foreach_div(self._totals, step.weight))", "self._totals", EVERY),
    Mutant(EXECUTOR, 'edge if kind == "F" else edge.gradients', "edge", "pipeline/test_edges.py"),
    Mutant(
        EXECUTOR, "min(stage, message.target) %", "max(stage, message.target) %", "pipeline/test_edges.py"
    ),
    Mutant(STEP_MEMORY, "self.peak_live = live", "self.peak_live = live + 1", EVERY),
    # ---- activations in host memory
    Mutant(OFFLOAD, "positions[1] < positions[2]", "positions[1] <= positions[2]", OF_OFFLOAD),
    Mutant(OFFLOAD, "backward - ahead, backward", "backward, backward", OF_OFFLOAD),
    Mutant(
        OFFLOADED,
        "        self._link.wait(copied)\n        for storage in storages:\n            storage.dev",
        "        for storage in storages:\n            storage.dev",
        OF_OFFLOADING,
    ),
    Mutant(OFFLOADED, "if cdata not in staying", "", OF_OFFLOADING),
    Mutant(OFFLOADED, "if tensor._version != version:", "if False:", OF_OFFLOADING),
    # ---- steps of any number of microbatches
    Mutant(SCHEDULES, "lru_cache(KEPT)(self._make_training)", "self._make_training", OF_COUNTS),
    Mutant(SCHEDULES, "lru_cache(KEPT)(self._make_forwards)", "self._make_forwards", OF_COUNTS),
    Mutant(
        "pipeline/pipeline.py", "return find(built.microbatches), RefusedBatch(error)", "raise", OF_COUNTS
    ),
    Mutant("pipeline/steps/runner.py", "total_tokens or tokens, collect", "tokens, collect", OF_COUNTS),
    Mutant(
        "parallel/expert/replay.py", "        self.reset()  # an equal", "        pass  # an equal", OF_COUNTS
    ),
    Mutant(
        "pipeline/options.py",
        "without_weight_gradients(with_microbatches(self.schedule, chosen, count), frozen)",
        "with_microbatches(self.schedule, chosen, count)",
        OF_COUNTS,
    ),
    Mutant("train/data/rows.py", "min(end, self.longest)", "end", "train/data/test_rows.py"),
    Mutant(
        "train/data/loading.py",
        "    data.check(data.steps_of(config.train))\n",
        "",
        "train/data/test_sources.py",
    ),
    Mutant("train/sizes.py", "max(min(step - 1, until) - done, 0)", "until - done", "train/test_sizes.py"),
    Mutant(
        "train/skips.py", "left_out = (*run.state.seen.left_out, (", "left_out = ((", "train/test_skips.py"
    ),
    Mutant(
        "train/records/slow_ranks.py",
        "known[at + (at >= position)]",
        "known[at]",
        "train/records/test_slow_ranks.py",
    ),
    Mutant("train/data/batches.py", "taken=left_out.stop)", "taken=left_out.start)", "train/test_skips.py"),
    Mutant(
        "train/checkpoints.py",
        "hidden = [(_step_of(path), path) for",
        "hidden = [(None, path) for",
        "train/test_checkpoints.py train/test_protocol.py",
    ),
    Mutant(
        "train/run.py",
        "    check_unchanged(output, start)\n",
        "",
        "train/test_checkpoints.py",
    ),
    Mutant(
        "train/records/metrics.py",
        "        with writable(self._path), open(",
        "        with open(",
        "train/records/test_metrics.py",
    ),
    Mutant("train/state.py", "loss < self.loss - least", "loss < self.loss", "train/test_ramps.py"),
    # ---- lowering
    Mutant(PLAN, "if self._position[taker] <= reached:", "if True:", "runtime/test_plan.py"),
    Mutant(PLAN, "if self._position[taker] <= reached:", "if False:", "runtime/test_plan.py"),
    Mutant(
        PLAN, "            yield from map(Free, sends)", "            sends.clear()", "runtime/test_plan.py"
    ),
    Mutant(ORDER, "op.stage - SOURCE[op.kind]", "op.stage + 1", "runtime/test_plan.py"),
    Mutant(
        OPS_OF, "op.stage + step, self.placement.depth", "op.stage - step, self.placement.depth", OF_ARRAYS
    ),
    Mutant(OPS_OF, "if not step or stage // depth", "if stage // depth", OF_ARRAYS),
    # ---- verify
    Mutant(VERIFY, '{"F": 1, "B": -1, "W": -1}', '{"F": 1, "B": -1, "I": -1}', OF_VERIFY),
    Mutant(VERIFY, '{"I": 1, "W": -1}', '{"I": 1, "B": -1}', f"{OF_VERIFY} {EVERY}"),
    Mutant(VERIFY, "peak > memory_limit", "peak >= memory_limit", OF_VERIFY),
    Mutant(VERIFY, "taken & split & schedule.trains", "taken & False", OF_VERIFY),
    Mutant(VERIFY, "in (arrays.source, arrays.own)", "in (arrays.source,)", OF_VERIFY),
    Mutant(VERIFY, "in (arrays.source, arrays.own)", "in (arrays.own,)", OF_VERIFY),
    Mutant(ARRAYS, "needed = also_needs.get(at, NOTHING)", "pass", f"{OF_ARRAYS} {OF_VERIFY}"),
    Mutant(TURNS, "(there if there > free_at else free_at) + duration", "free_at + duration", OF_SIMULATE),
    Mutant(TURNS, "free[arrays.before[op]]", "end[arrays.before[op]]", OF_TURNS),
    Mutant(SAMPLE, ".max(axis=1, keepdims=True)", "", OF_SAMPLE),
    Mutant(SAMPLE, "[:, 0] *= factor", "[:] *= factor", OF_SAMPLE),
    Mutant(VERIFY, "~arrays.on_its_rank | ", "", OF_VERIFY),
    Mutant(VERIFY, " | ~arrays.is_indexed", "", OF_VERIFY),
    Mutant(VERIFY, "arrays.walk({needed for _, needed in too_late})", "arrays.walk()", OF_VERIFY),
    Mutant(
        VERIFY,
        "later = needed > np.arange(len(needed))",
        "later = needed > np.arange(1, len(needed) + 1)",
        OF_VERIFY,
    ),
    Mutant(VERIFY, "kinds = (arrays.slot[one]", "kinds = False & (arrays.slot[one]", OF_VERIFY),
    Mutant(VERIFY, "if copies[microbatch] > 1:", "if copies[microbatch] > 2:", OF_VERIFY),
    Mutant(ARRAYS, " & np.not_equal(self.rank[self.source], self.rank)", "", OF_ARRAYS),
    # ---- simulate
    Mutant(SIMULATE, " & (hosts[edge] != np.roll(hosts, -1)[edge])", "", OF_SIMULATE),
    Mutant(SIMULATE, "(edge != NOTHING) & ", "", OF_SIMULATE),
    # ---- split backward
    Mutant(
        BACKWARD,
        "if received.requires_grad",
        "if received.grad is not None",
        f"{OF_SPLIT} pipeline/test_edges.py",
    ),
    Mutant(DEFERRED, "total += products.pop().gradient()", "total = products.pop().gradient()", OF_SPLIT),
    Mutant(DEFERRED, "product.dy.clone()", "product.dy", OF_SPLIT),
    Mutant(DEFERRED, "if (self.x._version, self.dy._version) != self.versions:", "if False:", OF_SPLIT),
    Mutant(
        DEFERRED,
        " or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:",
        ":",
        OF_SPLIT,
    ),
    Mutant(
        DEFERRED,
        "(product.x, product.dy) if product.counts else (product.dy,)",
        "(product.x, product.dy)",
        OF_SPLIT,
    ),
    Mutant(
        RECORDING,
        "            or parameter._backward_hooks\n            or parameter._post_accumulate_grad_hooks\n",
        "",
        OF_SPLIT,
    ),
    Mutant(RECORDING, " or id(parameter) in self._inputs", "", f"{OF_SPLIT} pipeline/test_edges.py"),
    # ---- autocast
    Mutant(CASTS, " or known.state != state", "", OF_SPLIT),
    Mutant(CASTS, "        self._casts.clear()\n", "", OF_AUTOCAST),
    Mutant(
        RECORDING,
        "            return self._weights.of(tensor, dtype)\n",
        "            return tensor.to(dtype)\n",
        OF_AUTOCAST,
    ),
    Mutant(RECORDING, " or not torch.is_autocast_cache_enabled()", "", OF_AUTOCAST),
    Mutant(RECORDING, "self._casts is None or not tensor.requires_grad", "self._casts is None", OF_AUTOCAST),
    Mutant(CASTS, "torch.inference_mode(False), torch.enable_grad()", "torch.enable_grad()", OF_AUTOCAST),
    Mutant(EXECUTOR, "            torch.clear_autocast_cache()", "            pass", OF_AUTOCAST),
    Mutant(
        "pipeline/steps/run_parts.py",
        "return autocasting(self._dtype, self._device)",
        "return nullcontext()",
        OF_AUTOCAST,
    ),
    Mutant(
        "models/tracing/autocast.py",
        "self.casts.of(tensor, self._dtype) if is_weight(tensor) else ",
        "",
        OF_AUTOCAST,
    ),
    Mutant(
        "parallel/fsdp.py",
        "        _gather_the_rest_as_it_is(module, sharded)\n",
        "        pass\n",
        "parallel/test_precision.py",
    ),
    # ---- optimizers by torchao
    Mutant("train/optimizers/low_bit.py", "{name} {done}", "{done}", "train/optimizers/test_low_bit.py"),
    Mutant(
        "checkpoint/optimizer_state.py",
        "            getattr(whole_parts[name], piece).copy_(value)\n",
        "            pass\n",
        "train/optimizers/test_low_bit.py",
    ),
    Mutant(
        STEP_MEMORY,
        "before is None and not self.ledger.has_run(index)",
        "False",
        "runtime/test_step_memory.py runtime/device/test_memory.py",
    ),
    Mutant(
        STEP_MEMORY,
        "            self.ledger.correct(before.footprint, measured)\n",
        "            pass\n",
        "runtime/test_step_memory.py runtime/device/test_memory.py",
    ),
    Mutant(
        "runtime/sharded_weights.py",
        "    if not all(type(kind) is Shard or isinstance(kind, Replicate) for kind in placements):\n"
        "        return None\n",
        "",
        "runtime/test_sharded_weights.py",
    ),
    Mutant(
        "models/weights/files.py",
        "if name in shards and not is_converted:",
        "if name in shards:",
        "parallel/test_first_reads.py",
    ),
    Mutant(
        "models/weights/reading.py",
        "if not is_held_elsewhere(scratch.memory)]",
        "]",
        "models/weights/test_reading.py",
    ),
    Mutant(DEFERRED, "        products.reverse()\n        gradient +=", "        gradient +=", OF_SPLIT),
    Mutant(
        "runtime/split_backward/modules.py", "        type(self) is nn.Linear\n", "        True\n", OF_SPLIT
    ),
    Mutant(
        "runtime/split_backward/modules.py",
        '                del module.__dict__["forward"]\n',
        "                pass\n",
        OF_SPLIT,
    ),
    # ---- prediction layers
    Mutant(LOSS, "documents == reached", "documents >= 0", "models/test_mtp.py"),
    Mutant(LOSS, "ahead(following, depth, IGNORED)", "ahead(following, 1, IGNORED)", "models/test_mtp.py"),
    Mutant(LOSS, '["mtp_loss_scaling_factor"] / len(predicted)', '["mtp_loss_scaling_factor"]', OF_MTP),
    Mutant(
        MTP, "hidden_states[-len(mtp_tokens) :]", "hidden_states[: len(mtp_tokens)]", "models/test_mtp.py"
    ),
    Mutant(MTP, "ahead(mtp_tokens, layer.depth, 0)", "ahead(mtp_tokens, 1, 0)", "models/test_mtp.py"),
    Mutant(
        MTP,
        "[layer.enorm(following), layer.hnorm(previous)]",
        "[layer.hnorm(previous), layer.enorm(following)]",
        "models/test_mtp.py",
    ),
    Mutant(
        "parallel/fsdp.py",
        "layer is module or rest.isdisjoint(map(id, layer.parameters()))",
        "True",
        "parallel/test_fsdp.py::test_a_layer_that_shares_a_weight_with_the_rest_is_sharded_with_the_rest",
    ),
    # ---- loss
    Mutant(
        LOSS,
        "else labels[:, 1:]\n\n    def _compared",
        "else labels\n\n    def _compared",
        f"batch/test_loss.py {EVERY}",
    ),
    Mutant(
        LOSS, "logits[:, :-1], labels[:, 1:]", "logits[:, 1:], labels[:, 1:]", f"batch/test_loss.py {EVERY}"
    ),
    Mutant(PLACEMENT, "or version != tensor._version ", "", OF_PLACEMENT),
    Mutant(PLACEMENT, "tensor.stride(), tensor.storage_offset())", "tensor.stride(), 0)", OF_PLACEMENT),
    Mutant(PLACEMENT, " and _fills_its_memory(leaf)]", "]", OF_PLACEMENT),
    Mutant(LOSS, 'reduction="sum", label', 'reduction="mean", label', f"batch/test_loss.py {EVERY}"),
    Mutant(
        LOSS,
        ".to(total.device) * items",
        ".to(total.device)",
        "models/test_every_model.py::test_exact_with_the_routers_auxiliary_loss",
    ),
    Mutant(LOSS, "return mean * self._rows(microbatch)", "return mean", EVERY),
    # ---- what parallel axes and shared weights sum
    Mutant(
        REDUCTIONS,
        "-self.max(-number)",
        "self.max(number)",
        "pipeline/steps/test_agree.py parallel/test_outputs.py",
    ),
    Mutant(
        REDUCTIONS, "len(data) == len(tokens)", "len(data) >= len(tokens)", "pipeline/steps/test_agree.py"
    ),
    Mutant(
        REDUCTIONS,
        "return sum(tokens.values())",
        "return max(tokens.values())",
        "parallel/test_equivalence.py",
    ),
    Mutant(
        SHARED, "before if copy.grad is None else copy.grad.add_(before)", "before", f"{OF_SHARED} pipeline"
    ),
    Mutant(SHARED, "for copy in copies if count == 0 else ():", "for copy in ():", OF_SHARED),
    Mutant(
        SHARED,
        "            if id(copy) not in kept:\n                copy.zero_()\n",
        "            pass\n",
        OF_SHARED,
    ),
    Mutant(SHARED, "if len(set(trained.values())) == 1:", "if trained:", OF_SHARED),
    # ---- stage
    Mutant(
        STAGE,
        "whole_backward(self.live.pop(number), gradients)",
        "whole_backward(self.live[number], gradients)",
        f"runtime/test_stage.py {EVERY}",
    ),
    Mutant(
        STAGE,
        "            part.training = training\n",
        "            pass\n",
        "runtime/test_stage.py pipeline/test_edges.py",
    ),
    Mutant(
        "models/activation_checkpointing.py",
        "self.on = how.recompute",
        "self.on = False",
        "models/test_activation_checkpointing.py runtime/device/test_memory.py",
    ),
]


def problem(mutant: Mutant) -> str:
    """Why this mutant cannot be made, empty where it can."""
    file = ROOT / "src" / "penstock" / mutant.file
    if not file.is_file():
        return "the file is gone"
    for path in mutant.tests.split():
        if not (ROOT / "tests" / path.partition("::")[0]).exists():
            return f"there is no {path}"
    count = file.read_text(encoding="utf-8").count(mutant.snippet)
    return "" if count == 1 else f"the snippet occurs {count} times"


def run(mutant: Mutant, tree: Path) -> str:
    """Run its tests on `tree`, which has nothing else changed; caught, survived, or what else happened.

    Those of the sweep run where the others notice nothing.
    """
    file = tree / "src" / "penstock" / mutant.file
    original = file.read_text(encoding="utf-8")
    file.write_text(original.replace(mutant.snippet, mutant.replacement), encoding="utf-8")
    try:
        verdict = _verdict(mutant, tree)
        return _verdict(mutant, tree, "-m", "sweep") if verdict == "SURVIVED" else verdict
    except subprocess.TimeoutExpired:
        return f"no verdict within {LIMIT} s"
    finally:
        file.write_text(original, encoding="utf-8")


def _verdict(mutant: Mutant, tree: Path, *options: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *options]
    if EVERY in mutant.tests:  # a change that every case shows
        command += ["--fast", "--cases=3"]
    paths = [str(tree / "tests" / path) for path in mutant.tests.split()]
    done = subprocess.run(
        [*command, *paths], cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT,
        check=False,
    )  # fmt: skip
    # 2: it cannot even be imported; 5: all of its tests are in the sweep, or none is
    verdicts = {0: "SURVIVED", 1: "caught", 2: "caught", 5: "SURVIVED"}
    return verdicts.get(done.returncode, f"pytest ended with {done.returncode}: {done.stdout[-300:]}")


def main(arguments: list[str]) -> int:
    wanted = [argument for argument in arguments if argument != "--check"]
    numbered = [
        (number, mutant) for number, mutant in enumerate(MUTANTS, 1)
        if not wanted or any(each in mutant.file or each == str(number) for each in wanted)
    ]  # fmt: skip
    stale = [f"{number} {mutant.file}: {problem(mutant)}: {mutant.snippet!r}"
             for number, mutant in numbered if problem(mutant)]  # fmt: skip
    print(*stale, sep="\n")
    if "--check" in arguments:
        return len(stale) > 0
    verdicts: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        for number, mutant in numbered:
            if problem(mutant):
                continue
            began = time.monotonic()
            verdicts.append(run(mutant, tree))
            change = f"{mutant.snippet.strip()!r} -> {mutant.replacement.strip()!r}"
            print(
                f"{number:2} {verdicts[-1]:9} {time.monotonic() - began:4.0f} s  {mutant.file}: {change}",
                flush=True,
            )
    caught = verdicts.count("caught")
    print(f"{caught} of {len(verdicts)} caught; {len(stale)} are out of date")
    return caught < len(verdicts) or len(stale) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
