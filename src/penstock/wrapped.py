"""What a user's `parallelize_fn` makes of a stage's module."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from penstock.errors import ModelError
from penstock.options import Parallelize


def wrap(part: nn.Module, parallelize_fn: Parallelize | None, stage: int) -> tuple[nn.Module, nn.Module]:
    """The module that holds the stage's parameters, and the one to be called: most often the same.

    Where `part` comes back inside of another module (torch.compile, a wrapper of one's own), that one is
    called, and the parameters keep the names that they have in `part`.
    Raises ModelError for what is no module, and where names are lost or parameters left out.
    """
    if parallelize_fn is None:
        return part, part
    names = {name for name, _ in part.named_parameters()}
    made = parallelize_fn(part)
    if not isinstance(made, nn.Module):
        raise _refusal(
            stage, f"a {type(made).__name__}", "Return the module, also where it is altered in place"
        )
    if made is part or all(module is not part for module in made.modules()):
        kept = {name for name, _ in made.named_parameters()} & names
        if names and not kept:
            shown = next((name for name, _ in made.named_parameters()), "none")
            raise _refusal(
                stage,
                f"parameters such as {shown}",
                f"Keep names such as {min(names)}, or put the stage's module into the one returned",
            )
        return made, made
    inside = set(map(id, part.parameters()))
    if beside := [name for name, parameter in made.named_parameters() if id(parameter) not in inside]:
        raise _refusal(
            stage,
            f"a module with {beside[0]} beside the stage's own parameters",
            "Put it into the stage's module",
        )
    return part, cast(nn.Module, _CalledBy(made, part))


def _refusal(stage: int, returned: str, remedy: str) -> ModelError:
    return ModelError(
        f"parallelize_fn, which returned {returned} for stage {stage}",
        "it returns the stage's module, or one around it, with the parameters under their names",
        remedy,
    )


class _CalledBy:
    """A stage's module to all who ask, but for being called: then `outer` runs, which holds it."""

    def __init__(self, outer: nn.Module, inner: nn.Module) -> None:
        self._outer, self._inner = outer, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)
