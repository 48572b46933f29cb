"""Find references from a stage to the model that it was copied from.

`copy.deepcopy` copies modules, parameters, bound methods and partials, but not functions. A function that a
user has put into a model, as a forward or as a hook, may reach a module in four ways:

    layer.mlp.forward = lambda x: old(x) * 1.5          by its closure: `old` is a method of the caller's mlp
    def hook(module, args, output, adapter=adapter)     by a default
    def hook(module, args, output): model.adapter(...)  by a global name, as in a notebook
    AddsAdapter(adapter)                                by an attribute of an object

In a copy it would silently compute with the caller's weights and train them, not the stage's.
"""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.models.huggingface.boundary import BoundaryPlaceholder, ModulePlaceholder

_STAND_INS = (BoundaryPlaceholder, ModulePlaceholder)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
_HOLDERS = (types.CellType, types.MethodType, functools.partial, Mapping, list, tuple, set, frozenset)
_LIBRARIES = {"torch", "transformers", "penstock", "peft", "accelerate", "functools", "inspect", "typing"}
_LIBRARIES |= {"numpy"}
_TABLES = {"_parameters", "_buffers", "_modules"}


def copy_gradient_hooks(given: nn.Module, copies: dict[int, Any]) -> None:
    """Put the gradient hooks of the caller's parameters on their copies; `copy.deepcopy` drops them.

    They then run on the gradient of each microbatch.

    Args:
        given: the caller's whole model
        copies: the memo of the deep copy, so that methods become those of the copied modules

    Raises ModelError for a hook that runs after a gradient is accumulated.
    """
    for name, parameter in given.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"{name}, with a hook that runs after its gradient is accumulated",
                "it would run once a microbatch, on a gradient that is not whole yet",
                "Do it after pipe.step(), over pipe.named_parameters()",
            )
        copied = copies.get(id(parameter))
        if not parameter._backward_hooks or copied is None:
            continue
        copied.requires_grad_()  # a frozen one accepts no new hook, but keeps its hooks
        for hook in parameter._backward_hooks.values():
            copied.register_hook(copy.deepcopy(hook, copies))
        copied.requires_grad_(parameter.requires_grad)


def refuse_references(stage: nn.Module, given: nn.Module) -> None:
    """Raise ModelError if functions on modules of `stage` reach modules or tensors outside of the stage.

    Args:
        stage: the copy to be trained
        given: the caller's whole model
    """
    reaching = [(where, holder, part) for where, holder, value in _hung_on(stage) for part in reached(value)]
    if not reaching:
        return
    outside = {id(module): name or "the model" for name, module in given.named_modules()}
    outside |= {id(p): name for name, p in given.named_parameters(remove_duplicate=False)}
    outside |= {id(b): name for name, b in given.named_buffers(remove_duplicate=False)}
    in_stage = {id(module) for module in stage.modules()}
    in_stage |= {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
    for where, holder, part in reaching:
        if words := _why_not(part, holder, in_stage, outside):
            raise ModelError(
                f"{where}, which uses {words}",
                "a stage computes with a copy of its layers, but a function keeps its references",
                "Make it use its module argument, for a method or a submodule of that module; or put it on "
                "the modules of the built pipeline (pipe.modules, parallelize_fn)",
            )


def reaching_out(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Functions on a module that use another module, or its weights: (the function, what it uses)."""
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    names |= {id(parameter): name for name, parameter in model.named_parameters()}
    for where, holder, value in _hung_on(model):
        for part in reached(value):
            own = (holder.parameters if isinstance(part, Tensor) else holder.modules)()
            if id(part) in names and all(part is not value for value in own):
                yield where, names[id(part)]


def _why_not(part: Any, holder: nn.Module, in_stage: set[int], outside: Mapping[int, str]) -> str:
    """Why a function of `holder` may not use `part`; empty if it may."""
    if id(part) in outside:
        return f"{outside[id(part)]} of the model that was given"
    if isinstance(part, nn.Module):
        if any(inner is part for inner in holder.modules()):
            return ""
        if any(isinstance(module, _STAND_INS) for module in part.modules()):
            return "modules of another stage"
        if id(part) not in in_stage and any(parameter.requires_grad for parameter in part.parameters()):
            return f"{type(part).__name__}, a module with weights that this stage does not train"
    elif isinstance(part, nn.Parameter) and id(part) not in in_stage and part.requires_grad:
        return "a weight that this stage does not train"
    return ""


def _hung_on(stage: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Functions and objects that users put on modules: (name, the module that has it, the value)."""
    classes: set[type] = set()
    for name, module in stage.named_modules():
        if isinstance(module, _STAND_INS):
            continue
        shown = name or "the model"
        for attribute, value in vars(module).items():
            if isinstance(value, (dict, set)) and not value:  # most of what each of all modules has
                continue
            if attribute in _TABLES or isinstance(value, (*_PLAIN, Tensor, nn.Module)):
                continue
            hooks = isinstance(value, dict) and attribute.endswith("_hooks")
            for function in value.values() if hooks else (value,):
                label = f"a hook of {shown}" if hooks else f"{shown}.{attribute}"
                own = isinstance(function, types.MethodType) and function.__self__ is module
                yield label, module, function.__func__ if own else function
        if type(module) not in classes:
            classes.add(type(module))
            yield f"the forward of {type(module).__name__}", module, type(module).forward
        for own, parameter in module._parameters.items():
            for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
                yield f"a gradient hook of {shown}.{own}", module, hook


def reached(start: Any) -> Iterator[Any]:
    """The modules and tensors that `start`, a function or an object, reaches without its arguments.

    Not searched are modules, and the names that a library's functions use.
    """
    met: set[int] = set()
    waiting = [start]
    while waiting:
        value = waiting.pop()
        if id(value) in met or isinstance(value, _PLAIN):
            continue
        met.add(id(value))
        if isinstance(value, nn.Module | Tensor):
            yield value
        else:
            waiting.extend(_next(value))


def _next(value: Any) -> Iterator[Any]:
    """The values inside a value that is neither a module nor a tensor."""
    written_in = (value if isinstance(value, types.FunctionType) else type(value)).__module__ or ""
    library = written_in.partition(".")[0] in _LIBRARIES
    if isinstance(value, types.FunctionType):
        yield from (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        if not library:
            yield from (value.__globals__[n] for n in _names(value.__code__) if n in value.__globals__)
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, _HOLDERS) or not library:
        yield from gc.get_referents(value)
        yield vars(type(value)).get("__call__")


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names and attributes that the code uses, also in functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
