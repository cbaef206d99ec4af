"""Whether a function of the user's can be called as it will be, asked before the first call.

In: a function, and how many arguments it will get. Out: True or False, or InvalidOption with its signature.
Elsewhere: parameters that are filled in by type (`injection`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from bullpen.errors import InvalidOption

__all__ = ["check_takes", "parameters_of", "takes"]


def takes(function: Callable[..., Any], count: int, besides: Collection[str] = ()) -> bool:
    """Whether it can be called with so many arguments, besides those of these names."""
    try:
        signature = inspect.signature(function)
        given = [one for name, one in signature.parameters.items() if name not in besides]
        signature.replace(parameters=given).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # made in C, without a signature: the call itself will tell
        return True
    return True


def parameters_of(signature: inspect.Signature) -> str:
    """`(shop: int, day: str = 'today')`, without what it returns."""
    return str(signature.replace(return_annotation=inspect.Signature.empty))


def check_takes(
    option: str, function: Callable[..., Any], *arguments: str, kind: str = "a function", besides: Collection[str] = ()
) -> None:
    """Raise InvalidOption for a function that cannot be called with these arguments: else each call would fail."""
    if not takes(function, len(arguments), besides):
        wanted = f"{kind} of ({', '.join(arguments)}), not of {parameters_of(inspect.signature(function))}"
        raise InvalidOption(option, wanted, function)
