"""What a rank captures of the functions in which it raised, for `%ranks debug`.

It is pickled without any code or class of the learner's: a `Summary` stands for everything that is
not plain data.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_SHOWN_ATTRIBUTES = 10
_LONGEST_ATTRIBUTE = 80  # characters


class FrameCopy(NamedTuple):
    """A function of the learner's as it was when the exception passed through it."""

    file: str
    line: int
    first_line: int  # where its definition begins
    function: str
    locals: dict[str, Any]  # its arguments first
    globals: dict[str, Any]  # those that it uses


class Captured(NamedTuple):
    """All that was captured of an exception. from_gpu: some tensors are CPU copies."""

    frames: tuple[FrameCopy, ...]
    from_gpu: bool


class TensorCopy:
    """A small tensor on its way; when it is unpickled, it is a tensor again, on the CPU."""

    def __init__(self, tensor: torch.Tensor, grad: TensorCopy | None) -> None:
        # A clone, because of a view the whole memory would be pickled.
        copy = tensor.detach().cpu().resolve_conj().resolve_neg().clone()
        if type(tensor) is torch.nn.Parameter:
            copy = torch.nn.Parameter(copy, tensor.requires_grad)
        self._parts = copy.requires_grad_(tensor.requires_grad), grad

    def __reduce__(self) -> tuple:
        return _with_gradient, self._parts


def _with_gradient(tensor: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    tensor.grad = grad  # which PyTorch does not pickle
    return tensor


class Known(NamedTuple):
    """What is known of a value that was too large to be captured, or is not plain data.

    kind: the name of its type, or "module", "function" or "class". note: more, as text. attributes:
    those that were captured. begin: the first of its items.
    """

    kind: str
    note: str
    attributes: dict[str, Any]
    begin: Any


class Summary:
    """Stands for such a value in an expression. Its attributes are those that were captured."""

    __slots__ = ("_known",)

    def __init__(
        self, kind: str, note: str = "", attributes: dict[str, Any] | None = None, begin: Any = None
    ) -> None:
        self._known = Known(kind, note, attributes or {}, begin)

    def __reduce__(self) -> tuple:
        return Summary, tuple(self._known)

    def __repr__(self) -> str:
        kind, note, attributes, begin = self._known
        text = f"{kind} {note}".rstrip()
        if begin is not None:
            return f"<{text}: {begin!r} ...>"
        if note or not attributes:
            return f"<{text}>"
        shown = [
            f"{name}={shorten(repr(value), _LONGEST_ATTRIBUTE)}"
            for name, value in list(attributes.items())[:_SHOWN_ATTRIBUTES]
        ]
        more = ["..."] if len(attributes) > _SHOWN_ATTRIBUTES else []
        return f"<{text}: {', '.join(shown + more)}>"

    def __getattr__(self, name: str) -> Any:
        if name in self._known.attributes:
            return self._known.attributes[name]
        raise AttributeError(f"no attribute {name!r} of this {self._known.kind} was captured")

    def __dir__(self) -> list[str]:
        return sorted(self._known.attributes)

    def _refuse(self, *_: object) -> Any:
        raise TypeError(
            f"only a summary of this {self._known.kind} was captured; tensors, numbers, text, and "
            "lists and dicts of them are captured whole up to 1 MB a function"
        )

    # Without these, an expression would be about the summary and not about the value.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = _refuse
    __iter__ = __getitem__ = __contains__ = __call__ = __int__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = __pow__ = _refuse
    __hash__ = object.__hash__


def known(summary: Summary) -> Known:
    """Return what a summary knows; its own attributes are those of the value."""
    return summary._known


def shorten(text: str, longest: int) -> str:
    """Return a text on one line, without its middle if it is longer than `longest` characters."""
    text = " ".join(text.split())
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"
