"""PipelineTrainer: transformers' Trainer over a pipeline.

    Trainer's loop            on every rank          what PipelineTrainer puts in its place
    get_batch_samples         the same rows          keeps the batches of the step
    training_step             last batch of a step   pipe.step over all of them, in microbatches
    _clip_grad_norm           all gradients          the pipeline's norm, over all ranks
    optimizer.step            own stages             Trainer's, over this rank's parameters
    prediction_step           evaluation             pipe.evaluate
    _save_checkpoint, _load   all ranks together     penstock's checkpoint, with Trainer's files in it

The trainer's `model` is the whole model without values, which answers what the trainer asks of a model: its
columns, its weights' names, its number of parameters. `model_wrapped` is the pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from penstock.batch.shapes import logits_in
from penstock.checkpoint.contents import read_random_state, read_state, set_random_state
from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint
from penstock.errors import ModelError
from penstock.integrations.arguments import check_arguments, check_options
from penstock.integrations.one_process import OneProcessAccelerator, as_one_process
from penstock.integrations.rows import microbatches_of, own_rows
from penstock.pipeline.pipeline import Pipeline

_TRAINER_STATE, _TRAINING_ARGS = "trainer_state.json", "training_args.bin"  # transformers' names
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")


class PipelineTrainer(Trainer):  # type: ignore[misc]  # transformers is not followed
    """transformers' Trainer, whose steps, evaluations and checkpoints are those of a pipeline.

    Every rank makes one, with the same arguments and data, and calls its methods. A step has
    `per_device_train_batch_size * gradient_accumulation_steps` rows for each data-parallel part, in the
    pipeline's number of microbatches. All ranks log the same values, and call the same callbacks; the first
    writes the files.

    Attributes:
        pipe: the pipeline
        model: the whole model, without values
    """

    def __init__(self, model: Pipeline, args: TrainingArguments, **options: Any) -> None:
        """Collective.

        Args:
            model: a pipeline of a transformers model, from AutoPipeline.build
            args: the same on all ranks. `per_device_train_batch_size` and `per_device_eval_batch_size` count
                the rows of one data-parallel part.
            options: as for Trainer: train_dataset, eval_dataset, data_collator, processing_class, callbacks,
                optimizers (over `pipe.parameters()`), compute_metrics, ...

        Raises ConfigError for an argument that a pipeline cannot keep, ModelError for a pipeline that
        from_provider made.
        """
        self.pipe = model
        self._batches: list[Any] = []
        check_arguments(args, model, optim=(options.get("optimizers") or (None,))[0] is None)
        check_options(options, model)
        whole = whole_model(model)
        super().__init__(model=whole, args=as_one_process(args, model.batch_part[1]), **options)

    # ---- the job counts as one process, and the model has its values elsewhere

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = OneProcessAccelerator  # Trainer makes it, and takes none

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return int(args.train_batch_size * args.gradient_accumulation_steps)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """The pipeline's stages are on their devices."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Pipeline:
        return self.pipe

    # ---- a step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        self._batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return self._batches, items

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run all batches of the step at its last one: the loss of the step, and 0 for the batches before."""
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        self.optimizer.train()
        per_batch = self.pipe.schedule.microbatches // self.args.gradient_accumulation_steps
        parts = [own_rows(batch, *self.pipe.batch_part) for batch in self._batches]
        result = self.pipe.step([piece for part in parts for piece in microbatches_of(part, per_batch)])
        return torch.tensor(result.loss, device=self.args.device)

    def _clip_grad_norm(self, model: Any) -> float:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """Make the optimizer of this rank's parameters, in the groups that they have in the whole model."""
        optimizer: Optimizer = super().create_optimizer(self.pipe)
        return optimizer

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Names of the whole model, and of adapters, which only the stages have."""
        modules = [self.model, *self.pipe.modules.values()]
        return [
            name
            for module in modules
            for name in super(PipelineTrainer, self).get_decay_parameter_names(module)
        ]

    # ---- an evaluation

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Tensor | None]:
        batch = own_rows(inputs, *self.pipe.batch_part)
        if prediction_loss_only:
            return self._scalar(self.pipe.evaluate(batch).loss), None, None
        evaluation = self.pipe.evaluate(batch, outputs=True, everywhere=True)
        return self._scalar(evaluation.loss), logits_in(evaluation.outputs), batch.get("labels")

    def _scalar(self, value: float | None) -> Tensor | None:
        return None if value is None else torch.tensor(value, device=self.args.device)

    # ---- files

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write a folder that from_pretrained opens. Other files of the folder stay, such as checkpoints."""
        folder = Path(output_dir or self.args.output_dir)
        new = folder / ".model"
        self.pipe.save_pretrained(new)
        finish = partial(self._finish_folder, new, folder) if self.args.should_save else lambda: None
        self.pipe.ranks.attempt(f"write {folder}", finish)

    def _finish_folder(self, new: Path, folder: Path) -> None:
        """Move the files of `new` into `folder`, in place of older weights."""
        for old in [file for pattern in _WEIGHTS for file in folder.glob(pattern)]:
            old.unlink()
        for file in new.iterdir():
            file.replace(folder / file.name)
        new.rmdir()
        self._write_tokenizer(folder)

    def _write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer and the arguments, as Trainer does beside a model."""
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / _TRAINING_ARGS)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint, complete or not at all: Trainer's files are in it before it has its name."""
        self.store_flos()
        folder = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        best = folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
        if best == folder or (self.state.best_global_step and best.is_dir()):
            self.state.best_model_checkpoint = str(best)
        self._export_callbacks()
        state = {"scheduler": self.lr_scheduler.state_dict()}
        writer = CheckpointWriter(self.pipe, background=False)
        writer.save(folder, self.optimizer.optimizer, state, extra=self._write_trainer_files)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=self.args.output_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _export_callbacks(self) -> None:
        """Put the states of callbacks into the trainer's state, as Trainer does."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, states = type(callback).__name__, self.state.stateful_callbacks
                if isinstance(states[name], list):
                    states[name].append(callback.state())
                else:
                    states[name] = callback.state()

    def _write_trainer_files(self, folder: Path) -> None:
        self._write_tokenizer(folder)
        self._save_rng_state(str(folder))  # Python's and numpy's; torch's of each rank are in the checkpoint
        self.state.save_to_json(str(folder / _TRAINER_STATE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check that it is a checkpoint of a pipeline. Weights are read with the optimizer's state."""
        read_state(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, self.pipe, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(state["scheduler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            set_random_state(read_random_state(Path(checkpoint), self.pipe), self.pipe)

    def _load_best_model(self) -> None:
        self.pipe.load_weights(self.state.best_model_checkpoint)


def whole_model(pipe: Pipeline) -> PreTrainedModel:
    """The whole model of a pipeline, without values. Raises ModelError for one that from_provider made."""
    saved = pipe.files.saved
    if saved.kind is None:
        rule = "a trainer asks the class of the model for its columns and names"
        raise ModelError("a pipeline of an unknown class", rule, "Build it with AutoPipeline")
    with torch.device("meta"):
        return saved.kind(copy.deepcopy(saved.config))
