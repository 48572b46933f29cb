"""The model that a pipeline is built from, and its values: an object, a config, a folder, or a Hub name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.errors import CheckpointError, ConfigError, ModelError
from penstock.models import hub
from penstock.models.adapters import (
    Adapter,
    LoraConfig,
    adapter_of,
    add_adapter,
    unwrap,
    without_adapters,
)
from penstock.models.auto_class import auto_class, check_causal
from penstock.models.model_folder import code_refused, config_of, is_refused_code, other_files
from penstock.models.mtp import check_factor, with_mtp
from penstock.models.quantized import Quantize, check_quantized, quantize_base
from penstock.models.tracing.meta import Uninitialised, is_empty, without_values
from penstock.models.weights import files as weights
from penstock.models.weights import initial
from penstock.models.weights.folder import MANIFEST, check_lengths
from penstock.models.weights.reading import ran_out_of_memory
from penstock.models.weights.saved import FileLayout
from penstock.models.weights.tensor_file import fingerprint_of_files, fingerprint_of_tensors

ModelLike: TypeAlias = PreTrainedModel | PretrainedConfig | str | Path


@dataclass(frozen=True)
class Source:
    """The model that a pipeline is built from.

    model: the whole model, on the meta device unless the caller passed one with values
    files: with its weights; empty if they are in `model`, or are to be initialised
    other_files: further files of its folder that belong to the model, by their names there
    written: its folder, if penstock wrote it, with a manifest of its files
    adapter: the adapter that PEFT added to `model`, which is not in `files`; None without one
    quantize: the format of the matrices under the adapter, once they have their values
    commit: of a Hub name; None for any other source
    new: names of the model's tensors that no file has, and that get initial values by the user's option
    """

    model: PreTrainedModel
    files: tuple[Path, ...] = ()
    other_files: Mapping[str, Path] = field(default_factory=dict)
    written: Path | None = None
    adapter: Adapter | None = None
    quantize: Quantize | None = None
    commit: str | None = None
    new: tuple[str, ...] = ()

    def fill(
        self,
        model: PreTrainedModel,
        seed: int,
        device: torch.device | None = None,
        reads: weights.Reads | None = None,
    ) -> None:
        """Give values to `model`, whole or a stage's, on meta; or to a `write_through` twin.

        seed: of initial values; device: for weights from files, None leaves them in host memory
        reads: shares reads between processes that fill the same stage; None: this process reads all
        Raises CheckpointError, ModelError.
        """
        if not is_empty(self.model):
            weights.copy_values(model, self.model)
        with self._base_of(model) as ties:
            if self.files:
                weights.load(model, self.files, ties, device or torch.device("cpu"), reads, self.new)
            initial.initialise(model, self.model, ties, seed)
        if self.adapter is not None:
            initial.initialise_adapter(model, self.adapter, seed)
            weights.tie_within(model, weights.tied_names(self.model))
        if self.quantize is not None:
            quantize_base(model)

    @contextmanager
    def _base_of(self, model: PreTrainedModel) -> Iterator[weights.Ties]:
        """Inside the block, `model` is as before PEFT wrapped its modules. Yields the base model's ties.

        Afterwards an adapter's base model is frozen again: transformers unfreezes the weights that it reads.
        """
        named = functools.partial(model.named_parameters, remove_duplicate=False)
        trained = {} if self.adapter is None else {name: p.requires_grad for name, p in named()}
        with without_adapters(model, self.model):
            yield weights.tied_names(self.model)
        for name, parameter in named() if trained else ():
            parameter.requires_grad_(trained[name])

    def check(self, model: PreTrainedModel) -> None:
        """Raise the errors of `fill` about the files, from their headers; `model` gets no values."""
        with self._base_of(model) as ties:
            weights.check(model, self.files, ties, new=self.new)

    def checked(self, new: Sequence[str]) -> Source:
        """Check the files' headers against the whole model; return this source with the tensors of `new`.

        new: patterns of names. Raises CheckpointError; ConfigError for one that matches no missing tensor.
        """
        if self.quantize is not None:
            check_quantized(self.model, self.adapter, self.quantize)
        allowed: list[str] = []
        if self.files:
            whole = without_values(self.model)
            with self._base_of(whole) as ties:
                allowed = weights.check(whole, self.files, ties, whole=whole.state_dict().keys(), new=new)
        for pattern in new:
            if not any(fnmatchcase(name, pattern) for name in allowed):
                rule = "it is for weights that the model's files lack, and no such weight is missing"
                raise ConfigError(f"new_weights={pattern!r}", rule, "Leave it out, or fix the name")
        if allowed and self.adapter is not None:
            rule = "files of an adapter would not have them"
            remedy = "Save the model with its new weights first, and train the adapter on that"
            raise ConfigError(f"new_weights={', '.join(new)} under an adapter", rule, remedy)
        if allowed:
            lacking = f"initialised, as its files lack them: {', '.join(allowed)}"
            weights.say_once(self.files[0].parent, lacking)
        return replace(self, new=tuple(allowed))

    def base_fingerprint(self, seed: int) -> Callable[[], str]:
        """A function that computes a digest of an adapter's base model. It reads a few KB of each weight.

        It does not keep the model alive.
        """
        if self.files:
            return functools.cache(functools.partial(fingerprint_of_files, self.files))
        fingerprint = f"random weights of seed {seed}"
        if not is_empty(self.model):
            with without_adapters(self.model):
                copies = {name for names in weights.tied_names(self.model) for name in names[1:]}
                fingerprint = fingerprint_of_tensors(FileLayout.of(self.model, copies).tensors())
        return lambda: fingerprint

    @contextmanager
    def with_room(self) -> Iterator[None]:
        """Raise ModelError if the block, which makes the model's tensors, runs out of memory."""
        try:
            yield
        except (MemoryError, RuntimeError) as cause:
            if not ran_out_of_memory(cause):
                raise
            total = sum(parameter.nbytes for parameter in self.model.parameters())
            raise ModelError(
                f"{type(self.model).__name__} with {total / 1e9:,.1f} GB of weights",
                f"there is no room for a stage of it: {str(cause).splitlines()[0]}",
                "Split it over more ranks, take a smaller dtype, or fix the sizes in its config",
            ) from cause

    def read_other_files(self) -> dict[str, bytes]:
        """Read the other files now, as the folder may be gone at a save. Raises CheckpointError."""
        try:
            return {name: file.read_bytes() for name, file in self.other_files.items()}
        except OSError as cause:
            raise CheckpointError(
                str(cause.filename),
                f"it belongs to the model and is unreadable ({cause.strerror})",
                "Put it back",
            ) from cause


def open_source(
    model: ModelLike,
    dtype: torch.dtype | None,
    attention: str | None,
    adapter: LoraConfig | None = None,
    quantize: Quantize | None = None,
    mtp_factor: float | None = None,
    *,
    revision: str | None = None,
    trusted: bool = False,
    new_weights: Sequence[str] = (),
) -> Source:
    """Open the model without reading weights. The headers of its files are read, and must fit.

    In a folder that penstock wrote, the lengths of files are checked.

    model: a transformers model, which already has this dtype and attention, or a PeftModel of one; a config,
        a local folder, or a Hub name, whose files are fetched
    dtype, attention: None takes the config's; for a config without a dtype, that of the files
    adapter: config of a new adapter; not for an object
    quantize: format of the matrices under an adapter
    revision: of a Hub name
    mtp_factor: factor of the prediction layers' loss; None leaves these layers out. Not for an object
    trusted: whether Python code of the folder may run
    new_weights: patterns of names that may be missing in the files, and then get initial values
    Raises ConfigError, ModelError, CheckpointError, HubError.
    """
    model = unwrap(model)
    check_factor(mtp_factor)
    name, commit = model, None
    if isinstance(model, str):
        model, commit = hub.folder_of(model, revision, trusted=trusted)
    elif revision is not None:
        raise hub.not_on_the_hub(f"revision={revision!r}", type(model).__name__)
    if isinstance(model, PreTrainedModel):
        _check_options(model, dtype, attention, adapter, mtp_factor)
        return Source(model, adapter=adapter_of(model), quantize=quantize).checked(new_weights)
    of_folder: dict[str, Any] = {}
    config: Any = model
    if isinstance(model, str | Path):
        config, of_folder = config_of(Path(model), trusted), _in_folder(Path(model).absolute(), trusted)
    if not isinstance(config, PretrainedConfig):
        raise ModelError(
            f"a model given as {type(model).__name__}",
            "AutoPipeline takes a transformers model, a config of one, a local folder or a Hub name",
            "Pass one of these, or build stages of your own with Pipeline.from_provider",
        )
    if files := of_folder.get("files"):
        _check_not_quantized(config, files[0].parent)
        if dtype is None and config.dtype is None:  # as transformers does
            dtype = weights.first_dtype(files)
    built = _built_from_config(config, dtype, attention, mtp_factor, trusted=trusted)
    check_causal(built)
    _check_gradient_hooks(built)
    if adapter is not None:
        base = str(name if commit is not None else Path(model).absolute()) if files else None
        add_adapter(built, adapter, base, commit)
    source = Source(built, adapter=adapter_of(built), quantize=quantize, commit=commit, **of_folder)
    return source.checked(new_weights)


def _in_folder(folder: Path, trusted: bool) -> dict[str, Any]:
    """The fields of Source for a model's folder. Raises CheckpointError if it changed since its save."""
    written = folder if (folder / MANIFEST).is_file() else None
    if written is not None:
        check_lengths(folder, added=True)
    files = tuple(weights.weight_files(folder))
    return {"files": files, "other_files": other_files(folder, trusted=trusted), "written": written}


def _built_from_config(
    config: PretrainedConfig,
    dtype: torch.dtype | None,
    attention: str | None,
    mtp_factor: float | None,
    *,
    trusted: bool,
) -> PreTrainedModel:
    """The model on the meta device. Raises ModelError if transformers builds no causal LM from the config."""
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"), Uninitialised():
            built: PreTrainedModel = auto_class(config).from_config(
                config, dtype=dtype or config.dtype, trust_remote_code=trusted, **options
            )
            if mtp_factor is None:
                return built
            config = copy.deepcopy(built.config)
            config.mtp_loss_scaling_factor = mtp_factor
            return with_mtp(type(built))._from_config(config, dtype=dtype or config.dtype, **options)
    except ModelError:
        raise
    except Exception as cause:  # any error of a model's own code about its config
        if is_refused_code(cause):
            raise code_refused(f"model_type={config.model_type!r}") from None
        said = next(iter(str(cause).splitlines()), "") or type(cause).__name__
        said = f"it knows no {said}" if isinstance(cause, KeyError) else said
        if attention is not None and "attention" in said.lower().replace("attn", "attention"):
            rule = f"transformers has no such attention for {config.model_type}: {said}"
            raise ModelError(f"attention={attention!r}", rule, "Take 'sdpa' or 'eager'") from cause
        if type(config) not in auto_class(config)._model_mapping:
            said = "none of its models for texts (causal, masked, of tokens, of rows) has this type"
        raise ModelError(
            f"model_type={config.model_type!r}",
            f"transformers builds no causal LM from it: {said}",
            "Take a config of a decoder-only language model, or fix the value named above",
        ) from cause


def _check_not_quantized(config: PretrainedConfig, folder: Path) -> None:
    """Raise ModelError for files of quantised weights, with scales in separate tensors."""
    how = getattr(config, "quantization_config", None)
    if how is not None:
        method = how.get("quant_method") if isinstance(how, dict) else getattr(how, "quant_method", None)
        raise ModelError(
            f"the weights in {folder}, quantized by {method or 'an unknown method'}",
            "weights are read as they are stored, and these have no meaning without their scales",
            "Take the model in bfloat16, or dequantize it with transformers and save that",
        )


def _check_gradient_hooks(built: PreTrainedModel) -> None:
    hooked = (name for name, p in built.named_parameters() if getattr(p, "_backward_hooks", None))
    if name := next(hooked, None):
        raise ModelError(
            f"{name}, with a hook on its gradient that {type(built).__name__} itself registers",
            "from a config or a folder, parameters are replaced when their values come, and lose hooks",
            "Give the model object, whose hooks are copied",
        )


def open_without_flash(
    model: ModelLike, attention: str | None, *, trusted: bool = False, **options: Any
) -> tuple[Source, str | None]:
    """Open a model for a plan; also return the name of its flash attention, if that is not installed here.

    The model's config still names that attention. Its forward needs `sdpa_for_flash`.

    options: more of `open_source`
    """
    opened = functools.partial(open_source, model, trusted=trusted, **options)
    try:
        return opened(attention=attention), None
    except ModelError as error:
        config = model if isinstance(model, PretrainedConfig) else config_of(Path(str(model)), trusted)
        flash = attention or str(config._attn_implementation)
        if not isinstance(error.__cause__, ImportError) or flash not in ALL_ATTENTION_FUNCTIONS:
            raise
    source = opened(attention="sdpa")
    for part in source.model.modules():
        if isinstance(getattr(part, "config", None), PretrainedConfig):
            part.config._attn_implementation_internal = flash
    return source, flash


@contextmanager
def sdpa_for_flash() -> Iterator[None]:
    """Replace every flash attention by torch's own, for forwards without values.

    It keeps equally many bytes for the backward: queries, keys, values, the output and a number per query.
    """
    names = [name for name in ALL_ATTENTION_FUNCTIONS if "flash" in name]
    for name in names:
        ALL_ATTENTION_FUNCTIONS[name] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        for name in names:
            del ALL_ATTENTION_FUNCTIONS[name]


def _check_options(
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    attention: str | None,
    adapter: LoraConfig | None,
    mtp_factor: float | None,
) -> None:
    """Raise ModelError for options that would need another model object."""
    present = model.config._attn_implementation
    anew = "Build the object with it, or give its config or folder instead"
    by_class = f"Build it with penstock.with_mtp({type(model).__name__}), which reads its config's"
    for value, is_other, remedy in (
        (f"dtype={dtype} for a model object with {model.dtype}", dtype not in (None, model.dtype), anew),
        (f"attention={attention} for a model object with {present}", attention not in (None, present), anew),
        ("mtp_loss_scaling_factor for a model object", mtp_factor is not None, by_class),
        ("adapter= for a model object", adapter is not None, "Give get_peft_model(model, config)"),
    ):
        if is_other:
            raise ModelError(value, "a model object is not changed", remedy)
