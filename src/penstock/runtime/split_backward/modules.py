"""The modules of a stage that compute products with a weight: during a step, each records them on the tape.

A torch function mode would see every call of a forward, of which one in twenty is a product. So during a step
the forward of each nn.Linear uses the tape directly. Any other module with a matrix of its own runs under the
mode, and so does an nn.Linear that a user has changed. The first forward of a stage runs under the mode as a
whole. If the mode sees a product outside of these modules, as of a head with the embedding's weight, the
stage's later forwards run under it too.

The forwards are attributes of the modules from the beginning of a step to its end. Changes that a user makes
between steps take effect; a module that has a forward of its own keeps it.
"""

from __future__ import annotations

import sys
from types import FunctionType, MethodType
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.compiler import is_dynamo_compiling

from penstock.private import C_LINEAR as _LINEAR
from penstock.private import DYNAMO
from penstock.private import len_torch_function_stack as _modes
from penstock.runtime.split_backward.products import LINEAR
from penstock.runtime.split_backward.recording import Tape, current, thread

# torch's own functions: users replace them, some before they import penstock
_FORWARD = nn.Linear.forward
_KEEPS_FORWARD = _FORWARD.__globals__ is vars(nn.modules.linear)


class ProductModules:
    """The modules with products of one stage.

    Args:
        module: the module with the stage's parameters
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._installed: list[tuple[nn.Module, MethodType]] = []
        self._modules: list[tuple[int, type, bool]] = []  # of the last step
        self._all_ask: bool | None = None  # None until a forward has shown it

    @property
    def every_call(self) -> bool:
        """Whether a forward has to run under the mode as a whole."""
        return not (self._all_ask and self._installed)

    def begin_step(self, all_ask: bool | None = None) -> None:
        """Replace the forwards. all_ask: whether they make all products; None: the first forward shows it"""
        modules = all_modules(self._module)
        known = [(id(module), type(module), "forward" in module.__dict__) for module in modules]
        if known != self._modules:
            self._modules, self._all_ask = known, all_ask
        if any(map(is_compiled, modules)):
            self._all_ask = False  # a compiler does not look into such forwards
            return
        for module in modules:
            forward = _asking(module)
            if forward is not None:
                module.__dict__["forward"] = forward
                self._installed.append((module, forward))

    def saw(self, tape: Tape) -> None:
        """A forward of the step has been recorded."""
        if self._all_ask is None:
            self._all_ask = not tape.saw_product

    def end_step(self) -> None:
        for module, forward in self._installed:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
        self._installed = []


def all_modules(module: nn.Module) -> list[nn.Module]:
    """`module.modules()` with fewer Python calls: this runs in every step."""
    modules: dict[int, nn.Module] = {}
    todo = [module]
    while todo:
        inner = todo.pop()
        if id(inner) not in modules:
            modules[id(inner)] = inner
            todo += [child for child in reversed(inner._modules.values()) if child is not None]
    return list(modules.values())


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile compiles `module`."""
    dynamo = sys.modules.get(DYNAMO)  # not imported means not used
    return module._compiled_call_impl is not None or (
        dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    )


def _asking(module: nn.Module) -> MethodType | None:
    """A forward of `module` that uses the tape; None where it makes no product, or has its own forward."""
    kind = type(module)
    if "forward" in module.__dict__ or kind is nn.Embedding:
        return None
    if kind is nn.Linear:
        return MethodType(_linear, module)
    for parameter in module._parameters.values():
        if parameter is not None and parameter.dim() > 1:
            return MethodType(_under_mode, module) if _is_method(kind) else None
    return None


def _is_method(kind: type[nn.Module]) -> bool:
    """Whether `forward` of the class is an ordinary method, which can be called with the module."""
    forward = next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
    return isinstance(forward, FunctionType)


def _linear(self: nn.Linear, *args: Any, **kwargs: Any) -> Any:
    if is_dynamo_compiling():  # of a function that calls the module
        return type(self).forward(self, *args, **kwargs)
    attributes = self.__dict__
    parameters = attributes["_parameters"]
    if (  # a hook may change torch's own module, or its class, at any time
        type(self) is nn.Linear
        and nn.Linear.forward is _FORWARD
        and _KEEPS_FORWARD
        and F.linear is _LINEAR
        and "weight" in parameters
        and "bias" in parameters
        and "weight" not in attributes
        and "bias" not in attributes
        and len(args) == 1
        and not kwargs
    ):
        tape = thread.tape
        if tape is None and _modes():
            tape = current()
        if tape is None or not tape.every_call:
            weight, bias = parameters["weight"], parameters["bias"]
            if tape is not None and weight is not None and weight.dim() == 2:
                result = tape.product(args[0], weight, bias, LINEAR)
                if result is not None:
                    return result
            return _LINEAR(args[0], weight, bias)
    return _under_mode(self, *args, **kwargs)


def _under_mode(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(self).forward
    tape = None if is_dynamo_compiling() else current()
    if tape is None:
        return forward(self, *args, **kwargs)
    with tape.in_module():
        return forward(self, *args, **kwargs)


ASKING = frozenset((_linear, _under_mode))  # the functions of such forwards

for _function in (_linear, _under_mode):
    _function.__name__ = "forward"  # for pickle: a module saved during a step loads with its plain forward
