"""Functions around a module's call or its forward, without another module around it.

    around(layer, __call__=seeded)      seeded(plain) returns the function that replaces `plain`, the __call__
                                        of the layer's class, with the same signature

The module gets a class of its own, derived from the one that it has, with the same name. So its parameters,
hooks and state dict keep their names, `isinstance` still holds, and it is copied and pickled as before. A
function such as `seeded` reads its settings from attributes of the module.

The order of these functions, outermost first. Hooks lie between a module's call and its forward:

    call       timing (pipeline.summary), seeds (rng), offloading, the stage's boundary
    forward    left to torch (split_backward.compiled), checkpointing, routing, tensor parallelism, experts,
               the routers' loss (balance), prediction layers (mtp), the deferred head
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

Maker = Callable[[Any], Any]


def around(module: nn.Module, **makers: Maker) -> None:
    """Replace attributes of the module's class, for this module alone, in place.

    Does nothing where these makers are applied to the module already.

    Args:
        makers: by the name of a class's attribute, mostly __call__ or forward: a function that takes that
            attribute and returns its replacement. Give the same function for all modules, such as one of a
            file's top level: the derived classes are cached by it.
    """
    if not all(is_around(maker, module) for maker in makers.values()):
        module.__class__ = _derived(type(module), **makers)  # type: ignore[arg-type]  # classes are hashable


def is_around(maker: Maker, module: nn.Module) -> bool:
    """Whether `around` has applied `maker` to `module`."""
    return any(maker in vars(kind).get("_makers", ()) for kind in type(module).__mro__)


def undo(module: nn.Module, maker: Maker) -> None:
    """Give the module back the class that it had before `around`. `maker` was the last one."""
    assert maker in vars(type(module))["_makers"]
    module.__class__ = type(module).__bases__[0]


def derive(kind: type[nn.Module], **makers: Maker) -> type[nn.Module]:
    """A subclass of `kind` of the same name, whose attributes the makers made from those of `kind`."""
    attributes: dict[str, Any] = {"__module__": kind.__module__, "_makers": tuple(makers.values())}
    for name, make in makers.items():
        plain = getattr(kind, name)
        made = make(plain)
        attributes[name] = wraps(plain)(made) if callable(made) else made
    return type(kind.__name__, (kind,), attributes)


_derived = cache(derive)  # one for all of a kind: torch.compile compiles a forward anew for each class
