"""A step -> its memory with its saved activations on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from lightning_memguard.core.capture.capture import trusted_child
from lightning_memguard.core.capture.curve import Terms
from lightning_memguard.core.capture.predict import Surveyor
from lightning_memguard.report.failure import Offloaded
from lightning_memguard.training.offload.engine import Offload

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn

    from lightning_memguard.core.capture.program import Program
    from lightning_memguard.core.capture.recorder import Recorder


P = TypeVar("P", bound="Program")


class _Recorded(Offload):
    """Notes what it moves, for the time that takes."""

    def __init__(self, module: nn.Module, recorder: Recorder) -> None:
        super().__init__(module)
        self._recorder = recorder

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._recorder.note_moved(self.moved_bytes)


def offloaded(program: P) -> P:
    """Return a program whose training steps keep all their saved activations on the host."""
    return program.edited(around=_Recorded)


def predict_offloaded(program: Program, terms: Terms, batch_size: int) -> Offloaded:
    """Predict a step with its activations on the host, in a child: its trace is not held here.

    Raises:
        CannotTraceError: it cannot be captured.
    """

    def find(_: int) -> Offloaded:
        surveyor, other = Surveyor(offloaded(program)), replace(terms, learned=None)  # of the step as it was
        curve = surveyor.survey(batch_size, other, scalable=False)
        return Offloaded(curve.footprint_at(batch_size), curve.trace_at(batch_size).moved_bytes)

    with trusted_child(find) as child:
        return child.ask(0)
