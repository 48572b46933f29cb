"""A stage's forwards in a generation: the prompt first, then one token of each row, with a cache.

    prompt --prepare--> Generating: arguments of the model, logits processors, stopping criteria
    Generating --inputs--> forward of the stage --> its layers' entries are in the cache
               <-------------- count ------------- the cache's other layers count the tokens

transformers prepares everything: `generate` of the stage's model is called with a decoding method of ours,
which keeps what it gets. A stage's cache has a layer for each layer of the model, as models ask one of them,
often the first, how many tokens it holds. Those of other stages hold one byte a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.generation import GenerationMixin, GenerationMode

from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.models.mtp import PredictionModel
from penstock.models.tracing.towers import tower_inputs, without_pixels
from penstock.runtime.stage import StageCall

ROWS = "penstock:rows"  # the entry of a microbatch with its rows' generation
_CACHES = ("past_key_values", "cache_params")  # the names that models give to their cache
_STATE_IN_MODULES = {"recurrent_gemma"}


@dataclass
class Generating:
    """What transformers prepared for some rows on one stage.

    arguments: of the model's forward, for the whole sequence so far
    tokens: number of a row's tokens that the cache has
    """

    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    arguments: dict[str, Any]
    tokens: int = 0

    unfinished: Tensor | None = None

    @property
    def cache(self) -> Cache:
        return next(self.arguments[name] for name in _CACHES if name in self.arguments)

    @property
    def pad_token(self) -> int:
        """The token that follows in rows that have ended. Without one, all rows end together."""
        return 0 if self.config._pad_token_tensor is None else int(self.config._pad_token_tensor)

    def choose(self, ids: Tensor, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, bool]:
        """Choose the next tokens as transformers' `generate` does. On the last stage.

        Args:
            ids: (rows, tokens so far)
            logits: (rows, tokens, vocabulary), of which the last token's count

        Returns the tokens, (rows,), and whether all rows have ended with them.
        """
        if self.unfinished is None:
            self.unfinished = torch.ones(len(ids), dtype=torch.long, device=ids.device)
        scores = self.processors(ids, logits[:, -1].to(copy=True, dtype=torch.float32, device=ids.device))
        if self.config.do_sample:
            tokens = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).squeeze(1)
        else:
            tokens = scores.argmax(dim=-1)
        if any(hasattr(criterion, "eos_token_id") for criterion in self.criteria):
            tokens = tokens * self.unfinished + self.config._pad_token_tensor * (1 - self.unfinished)
        ended = self.criteria(torch.cat([ids, tokens[:, None]], dim=-1), None)
        self.unfinished = self.unfinished & ~ended
        return tokens, not bool(self.unfinished.any())


_ARGUMENTS = {"logits_processor", "stopping_criteria", "tokenizer", "prefix_allowed_tokens_fn"}


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options of a call into entries of the batch, and arguments of transformers' `generate`."""
    names = _ARGUMENTS | vars(GenerationConfig()).keys()
    entries = {name: value for name, value in options.items() if name not in names and value is not None}
    return entries, {name: value for name, value in options.items() if name in names}


def check_new_tokens(new: object) -> None:
    """Raise ConfigError for a number of new tokens that is no whole number above 0."""
    if type(new) is not int or new < 1:
        rule = "a generation makes at least one token"
        raise ConfigError(f"max_new_tokens={new!r}", rule, "Give a whole number of 1 or more")


def check_prompts(batch: Mapping[str, Any]) -> None:
    """Raise BatchError for prompts that no token can be generated after.

    batch: input_ids (rows, tokens), and perhaps an attention_mask of the same shape
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        value = f"input_ids of shape {list(ids.shape)}" if isinstance(ids, Tensor) else "no input_ids"
        remedy = "Give a tensor of (rows, tokens), with one token a row at least"
        raise BatchError(value, "each prompt has a token, after which the next one is generated", remedy)
    if not isinstance(mask, Tensor):
        return
    if mask.shape != ids.shape:
        value = f"an attention_mask of shape {list(mask.shape)}"
        raise BatchError(value, f"it has the shape of input_ids, {list(ids.shape)}", "Give the tokenizer's")
    if bool((mask[:, -1] == 0).any()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        rule = "the next token follows the last one of its row, so prompts are padded on the left, or empty"
        remedy = "Take padding_side='left' for the tokenizer, and leave empty prompts out"
        raise BatchError(f"an attention_mask that hides the last token of row {row}", rule, remedy)


def refuse_model(model: PreTrainedModel) -> None:
    """Raise ModelError for a model that cannot generate token by token with a cache."""
    name = type(model).__name__
    if isinstance(model, PredictionModel):
        rule = "its prediction layers make the values between stages longer"
        raise ModelError(f"generate() with {name}", rule, "Build it without prediction layers")
    if not isinstance(model, GenerationMixin) or model.config.is_encoder_decoder:
        rule = "only decoders with a language modelling head generate"
        raise ModelError(f"generate() with {name}", rule, "Call evaluate() or infer() for its outputs")
    takes_cache = inspect.signature(model.forward).parameters.keys() & set(_CACHES)
    if not takes_cache or not model._supports_default_dynamic_cache():
        rule = "it has no cache, or keeps its state in another form than transformers' DynamicCache"
        raise ModelError(f"generate() with {name}", rule, "Save it, and generate in one process")
    if model.config.model_type in _STATE_IN_MODULES:
        rule = "it keeps its state in its modules, where microbatches and training would mix it"
        raise ModelError(f"generate() with {name}", rule, "Save it, and generate in one process")


def prepare(model: PreTrainedModel, entries: Microbatch, options: Mapping[str, Any]) -> Generating:
    """Prepare the generation of some rows with transformers.

    Args:
        entries: input_ids (rows, tokens), and more entries of the model
        options: of transformers' generate; keys of GenerationConfig

    Raises ConfigError for options that transformers or a pipeline refuses.
    """
    kept: list[Generating] = []
    options = {"use_cache": True, **_with_stop_strings(options)}  # some models generate without by default

    def keep(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **arguments: Any,
    ) -> Tensor:
        kept.append(Generating(generation_config, logits_processor, stopping_criteria, arguments))
        return input_ids

    try:
        model.generate(**entries, **options, custom_generate=keep)
    except ValueError as error:
        rule = f"transformers refuses it: {str(error).rstrip('.')}"
        raise ConfigError("generate()", rule, "Change that option or entry") from error
    (generating,) = kept
    _refuse_options(generating)
    _refuse_router_losses(model, generating.arguments)
    _check_length(model, entries["input_ids"].shape[1], options["max_new_tokens"])
    if not any(isinstance(generating.arguments.get(name), Cache) for name in _CACHES):
        rule = "transformers makes no cache for it"
        raise ModelError(f"generate() with {type(model).__name__}", rule, "Generate in one process")
    return generating


def _with_stop_strings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with stop strings as a criterion, as transformers keeps no tokenizer for our method."""
    options = dict(options)
    tokenizer, strings = options.pop("tokenizer", None), options.get("stop_strings")
    if tokenizer is None or strings is None:
        return options
    own = StoppingCriteriaList(options.get("stopping_criteria") or ())
    own.append(StopStringCriteria(tokenizer, strings))
    return {**options, "stop_strings": None, "stopping_criteria": own}


_NOT_HERE = {  # options of transformers' generate, and what to do instead
    "num_return_sequences": "Repeat the rows of input_ids",
    "guidance_scale": "Leave it out",
    "prefill_chunk_size": "Give shorter prompts, or more microbatches",
    "cache_implementation": "Leave it out: each stage has a DynamicCache",
    "return_dict_in_generate": "Call infer() for logits",
    "token_healing": "Heal the prompts first",
}


COLDEST = 1e-4  # logits divided by a lower temperature overflow float32, and token 0 is drawn each time


def _refuse_options(generating: Generating) -> None:
    """Raise ConfigError for options that a pipeline cannot follow."""
    config, rule = generating.config, "a pipeline generates by greedy search or by sampling"
    if config.do_sample and config.temperature is not None and config.temperature < COLDEST:
        cold = f"sampling needs {COLDEST:g} or more: logits divided by less overflow float32"
        remedy = "Take do_sample=False, for the likeliest tokens"
        raise ConfigError(f"temperature={config.temperature:g}", cold, remedy)
    if config.num_beams != 1:
        raise ConfigError(f"num_beams={config.num_beams}", rule, "Take num_beams=1")
    if (mode := config.get_generation_mode()) not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigError(f"generation by {mode.value}", rule, "Take do_sample=True or False alone")
    if config.use_cache is False:
        raise ConfigError("use_cache=False", "each stage keeps a cache of its layers", "Leave it out")
    for name, remedy in _NOT_HERE.items():
        if (value := getattr(config, name, None)) not in (None, False, 1):
            raise ConfigError(f"{name}={value!r}", "generate() of a pipeline does not have it", remedy)
    if config._pad_token_tensor is None and len(generating.criteria) > 1:
        rule = "rows that end before others are padded"
        raise ConfigError("stopping criteria without a pad_token_id", rule, "Give pad_token_id")


def _refuse_router_losses(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError where transformers fails to compute the routers' loss of new tokens."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "output_router_logits", False) and arguments.get("attention_mask") is not None:
        raise ConfigError(
            "padded prompts with output_router_logits=True",
            "transformers would compute the loss of the new tokens' routers with the mask of all tokens",
            "Give prompts of one length, without padding",
        )


def _check_length(model: PreTrainedModel, prompt: int, new: int) -> None:
    """Raise ConfigError for more tokens than the model has positions; the last one needs none."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < prompt + new - 1:
        raise ConfigError(
            f"prompts of {prompt} tokens and max_new_tokens={new}",
            f"the model has positions for {most} tokens (max_position_embeddings)",
            f"Take max_new_tokens={most - prompt + 1}" if most >= prompt else "Shorten the prompts",
        )


class NextIds(Protocol):
    """The token ids of some rows. index: of their microbatch"""

    index: int

    def so_far(self) -> Tensor:
        """Prompts and all tokens before the next one, (rows, tokens). Waits for the latest."""


class GeneratingCall:
    """Runs a stage's forward for rows that are generated, with their cache.

    Args:
        model: the stage's model.
        call: the stage's call, an HFCall.
        is_first: whether it is the first stage, which encodes images.
    """

    def __init__(self, model: PreTrainedModel, call: StageCall, *, is_first: bool) -> None:
        self._model, self._call = model, call
        self._unseen = frozenset[str]() if is_first else tower_inputs(model)
        self._generating: dict[int, Generating] = {}  # by microbatch

    def prepare(self, index: int, entries: Microbatch, options: Mapping[str, Any]) -> Generating:
        """Begin to generate microbatch `index`. Raises the errors of `prepare`."""
        seen = without_pixels(self._unseen, dict(entries)) if self._unseen else dict(entries)
        generating = self._generating[index] = prepare(self._model, seen, options)
        return generating

    def __call__(self, received: tuple[Any, ...], microbatch: Microbatch) -> Any:
        """The value for the next stage; on the last stage the logits of the next tokens."""
        rows: NextIds = microbatch[ROWS]
        generating, ids = self._generating[rows.index], rows.so_far()
        is_prompt = generating.tokens == 0
        new = ids.shape[1] if is_prompt else 1
        inputs = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=new, is_first_iteration=is_prompt, **generating.arguments
        )
        output = self._call(received, inputs)
        generating.tokens += new
        count(generating.cache, generating.tokens)
        generating.arguments = self._model._update_model_kwargs_for_generation({}, generating.arguments)
        return output


def count(cache: Cache, tokens: int) -> None:
    """Make the layers of a stage's cache that belong to other stages hold as many tokens as its own layers.

    tokens: of a row so far; a model may add some of its own to them
    """
    attending = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    lengths = [layer.get_seq_length() for layer in attending]
    longest = max(tokens, *lengths, 0)
    for layer, length in zip(attending, lengths, strict=True):
        if length < longest:
            counted = torch.zeros((1, 1, longest - length, 1), dtype=torch.uint8)
            layer.update(counted, counted)
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
