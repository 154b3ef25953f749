"""Hooks at the end of an epoch, run on copies of the module and of callbacks with what a whole epoch leaves in lists.

Only the first batches ran; what the others would have appended is the last entry again, which takes no memory here: it
was counted before.
"""

from __future__ import annotations

import builtins
import collections
import copy
import functools
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from lightning_memguard.core.capture.holders import UsersCode, names_in
from lightning_memguard.core.capture.recorder import Recorder, part_bytes
from lightning_memguard.core.foreign import patched
from lightning_memguard.core.isolation.pool import is_forked
from lightning_memguard.core.objects import is_users, package_of, users_members, walk
from lightning_memguard.core.simulation.fake import fake_copy, real_copy
from lightning_memguard.core.trace.trace import WORTH_A_NOTE
from lightning_memguard.training.adapter.callbacks import held_in
from lightning_memguard.training.adapter.stand_ins import IdleCallback
from lightning_memguard.training.facts import lightning_port as lightning
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.units import format_bytes

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from lightning_memguard.core.torch_port import FakeTensorMode

_MOST_BATCHES = 1 << 14  # a hook that goes through more of them one by one would take long
_MOST_TENSORS, _TENSORS_A_BATCH = 1_000, 8  # made and freed in a hook; 1,000 take a second on fake tensors
# Of what is kept, at most, if the hook cannot be run: joined, less its mean, and what a library makes of that: NumPy's
# `std` a difference and its square.
COPIES = 4
_NEXT_TO_IT = 2  # of a copy of the weights that is kept: the next, and what glibc keeps of gradients or the one before


class Lists:
    """Lists that grow by each batch, wherever a module and callbacks hold them."""

    def __init__(self, owners: Sequence[object]) -> None:
        self._owners = owners
        self._before = {id(each): len(each) for each in self._lists()}
        self._is_full = False

    def fill(self, batches: int, in_all: int) -> None:
        """Repeat what the last of ``batches`` appended, as if there had been ``in_all``; once."""
        lists, self._is_full = [*self._lists()] if batches and not self._is_full else [], True
        for each in lists:
            grown = len(each) - self._before.get(id(each), 0)
            if grown > 0 and grown % batches == 0:
                each.extend([*each][-(grown // batches) :] * max(0, in_all - batches))

    def _lists(self) -> Iterator[Any]:
        return (each for each in walk(self._owners, _lists_and_owners) if type(each) in (list, deque))


def _lists_and_owners(owner: object) -> Iterator[object]:
    """Yield the lists that a module or an object of the user's has, also in a dict, and such objects below it."""
    values = [*vars(owner).values()] if hasattr(owner, "__dict__") else []
    for value in values:
        for each in [value, *value.values()] if isinstance(value, dict) else [value]:
            if type(each) in (list, deque) or isinstance(each, nn.Module) or is_users(each):
                yield each


def has_own(owner: object, hook: str) -> bool:
    """Whether the user's code has this hook."""
    return hook in users_members(type(owner))


class CollectingCallback(IdleCallback):
    """The user's callback as one that keeps what batches give: some of its hooks run, on a copy of it.

    Attributes:
        memguard_copy: the copy; None once a hook of it has raised, as one that needs values does.
        memguard_hooks: those that run.
    """

    def __init__(self, original: object, copy: object, hooks: Sequence[str]) -> None:
        super().__init__(original)
        vars(self).update(memguard_copy=copy, memguard_hooks=hooks)

    @override
    def __getattr__(self, name: str) -> Any:
        own = vars(self).get("memguard_copy")
        if own is None or name not in vars(self)["memguard_hooks"]:
            return super().__getattr__(name)
        return lambda *args: self.memguard_run(name, args)

    def memguard_run(self, name: str, args: tuple[Any, ...]) -> None:
        """Run a hook of the copy, in the copy's name, with a Trainer that it cannot steer."""
        vars(args[0])["memguard_is_read_only"] = True
        if attempt(lambda: getattr(vars(self)["memguard_copy"], name)(*args)).reason:
            vars(self)["memguard_copy"] = None
        vars(args[0])["memguard_is_read_only"] = False


AFTER_BATCHES = ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")
BEFORE_TRAINING = ("on_sanity_check_start", "on_sanity_check_end", "on_train_start")
EPOCH_END = "on_train_epoch_end"
# In Lightning's order. Those of a fit may compute over what its batches left: some models are fitted in validation.
AT_EPOCH_END = {
    "fit": (
        *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"),
        *(EPOCH_END, "on_train_end", "on_fit_end"),
    ),
    "validate": ("on_validation_epoch_end", "on_validation_end"),
    "test": ("on_test_epoch_end", "on_test_end"),
    "predict": ("on_predict_epoch_end",),
}


def collecting(
    callback: object,
    trainer: object,
    module: nn.Module,
    stage: str,
    copies: tuple[nn.Module, FakeTensorMode | None],
    recorder: Any,
) -> object:
    """Return the callback as one that collects what batches give, if its hooks do no more; else as an idle one."""
    after = [hook for hook in AFTER_BATCHES if has_own(callback, hook)]
    hooks = [*BEFORE_TRAINING, *(after if all(only_computes(callback, hook, module) for hook in after) else [])]
    hooks = [hook for hook in hooks if runs_here(callback, hook, module)]
    at_end = AT_EPOCH_END.get(stage, ())
    if not hooks and not any(runs_here(callback, hook, module) for hook in at_end):
        return IdleCallback(callback)
    module_copy, mode = copies
    box: Any = nn.Module()
    box.callback = callback
    instead = {id(trainer): None, id(module): module_copy}
    copied: Any = attempt(
        lambda: fake_copy(box, mode, torch.device("cpu"), instead) if mode else real_copy(box, instead)
    )
    own = getattr(copied.value, "callback", None)
    if own is None or own is callback:
        return IdleCallback(callback)
    for tensor in held_in(vars(own), module_copy):
        recorder.hold(tensor)  # those that the user's callback has were counted
    return CollectingCallback(callback, own, hooks)


def own_copy(callback: object) -> object | None:
    """The copy behind a callback of the shadow Trainer; None if its hooks do not run."""
    return vars(callback).get("memguard_copy")


# -- running the hooks


def run_hook(
    trainer: Trainer,
    module: LightningModule,
    owner: object,
    hook: str,
    recorder: Recorder,
    lists: Lists,
    batches: int,
    in_all: int,
) -> bool:
    """Run a hook at the end of an evaluation, as Lightning calls it; if it raises, count copies of what is kept.

    Returns:
        Whether it ran.
    """
    name, kept = f"{type(owner).__name__}.{hook}", recorder.alive_bytes
    try:
        _check(in_all)
        lists.fill(batches, in_all)
        with patched(recorder, module=name):
            _call(trainer, module, owner, hook)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and often needs values here
        recorder.assume(_not_run(name, _why(error)))
        recorder.expect(COPIES * max(0, kept), "activations", at_most=True)
        return False
    return True


def run_after_training(
    trainer: Trainer,
    module: LightningModule,
    hooks: Sequence[tuple[object, str]],
    recorder: Recorder,
    fill: Callable[[], object],
    in_all: int,
    samples: int,
    kept_bytes: int,
) -> None:
    """Run the hooks at the end of an epoch of training, one after the other, and count what each takes as one block.

    How many entries they go through depends on the batch size, so their events would not match those at another one;
    in whole bytes a sample, what they take is the same at each. The next epoch finds what they made and keep.
    ``kept_bytes`` an epoch leaves.
    """

    def run(owner: object, hook: str) -> None:
        _check(in_all)
        fill()
        trains = "validation" not in hook
        if module.training != trains:
            module.train(trains)
        with torch.set_grad_enabled(trains):
            _call(trainer, module, owner, hook)

    runs = [functools.partial(run, *each) for each in hooks]
    taken, made = recorder.peaks_inside(runs, _MOST_TENSORS + _TENSORS_A_BATCH * in_all)
    step = max(1, samples)
    if trainer.max_epochs != 1:
        _stays(recorder, -(-made // step) * step)
    for (owner, hook), (nbytes, error) in zip(hooks, taken, strict=True):
        name = f"{type(owner).__name__}.{hook}"
        recorder.mark("epoch end")
        with patched(recorder, module=name):
            recorder.take_for_a_moment(-(-nbytes // step) * step, "activations")
        if error is not None:
            bound(owner, hook, module, recorder, max(kept_bytes, nbytes), _why(error))
        elif nbytes >= WORTH_A_NOTE:
            note = f"{name} takes {format_bytes(nbytes)} at the end of an epoch, which is included"
            recorder.assume(note)


def _stays(recorder: Recorder, nbytes: int) -> None:
    """Count what a hook makes and keeps. On the CPU, the next is at most made in new pages, and leaves holes."""
    recorder.expect(nbytes, "callbacks")
    recorder.expect((_NEXT_TO_IT if recorder.device_type == "cpu" else 1) * nbytes, "activations", at_most=True)


def bound(owner: object, hook: str, module: nn.Module, recorder: Recorder, kept_bytes: int, why: str) -> None:
    """Count what a hook at the end of an epoch may take that does not run here.

    That are copies of what an epoch of training leaves, at most; and of the weights, if it names what copies them: the
    first is kept, and is still there when the next is made.
    """
    name = f"{type(owner).__name__}.{hook}"
    recorder.expect(COPIES * kept_bytes, "activations", at_most=True)
    if kept_bytes >= WORTH_A_NOTE:
        recorder.assume(_not_run(name, why))
    names = UsersCode(owner, *module.modules()).names(hook)
    on_host = recorder.device_type != "cpu" and "cpu" in names
    if "state_dict" in names and names & {"deepcopy", "clone"} and not on_host:
        weights = part_bytes({"": [*module.parameters(), *module.buffers()]}, recorder.device_type)[""]
        _stays(recorder, weights)
        if weights >= WORTH_A_NOTE:
            recorder.assume(f"{name} keeps a copy of the weights: {format_bytes(weights)}, included")


def bound_collected(
    callbacks: Iterable[object], runs: Callable[[object], bool], hook: str, recorder: Recorder, nbytes: int
) -> None:
    """Count, at most, what callbacks keep whose hook after batches does not run here, and copies of it.

    ``nbytes`` are the results of an epoch's batches, which it is given.
    """
    for owner in callbacks:
        if keeps(owner, hook) and not runs(owner) and nbytes >= WORTH_A_NOTE:
            recorder.expect((1 + COPIES) * nbytes, "activations", at_most=True)
            name = f"{type(owner).__name__}.{hook}"
            recorder.assume(f"at most, {name} keeps the results of an epoch, and copies them")


def _check(in_all: int) -> None:
    if in_all > _MOST_BATCHES:
        raise OverflowError(f"{in_all} batches")


def _call(trainer: Trainer, module: LightningModule, owner: object, hook: str) -> None:
    if owner is not module:
        getattr(owner, hook)(trainer, module)
        return
    lightning.call_module_hook(trainer, module, hook)


def _why(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:120] or type(error).__name__


def _not_run(name: str, why: str) -> str:
    return f"{name} was not run on a copy ({why}): at most, it copies what the epoch left"


# -- which hooks run


def runs_here(owner: object, hook: str, module: nn.Module) -> bool:
    """Whether the user has this hook and it runs on a copy: what it takes is predicted, or named if it fails there."""
    at_end = (each for hooks in AT_EPOCH_END.values() for each in hooks)
    is_run = hook in (*AFTER_BATCHES, *BEFORE_TRAINING, *at_end)
    return is_run and has_own(owner, hook) and only_computes(owner, hook, module)


def keeps(owner: object, hook: str) -> bool:
    """Whether a hook of the user's names what puts something into a list, and not only a number."""
    names = UsersCode(owner).names(hook)
    return bool(names & {"append", "extend", "appendleft", "setdefault", "update"}) and not (
        "item" in names and not names & {"numpy", "cpu", "detach", "tolist"}
    )


def only_computes(owner: object, hook: str, module: nn.Module) -> bool:
    """Whether a hook, and what it calls of its owner's, names nothing but tensors, lists, and its own or the module's.

    One that reads loaders, writes files or starts threads is not run, nor is one outside of a child: what it does there
    to what it shares with others would stay.
    """
    if not is_forked():
        return False
    code = UsersCode(owner, *module.modules())
    known = (_KNOWN | code.attributes(hook)) - _ACT
    return all(_is_known(function, known) for function in code.called_by(hook))


def _is_known(function: types.FunctionType, known: AbstractSet[str]) -> bool:
    """Whether a function names nothing else, nor a variable of the function around it, as a list that outlives it."""
    around = {*function.__code__.co_freevars} - {"__class__"}
    of_globals, attributes, _ = names_in(function)

    def is_known(name: str) -> bool:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            return package_of(value) in _LIBRARIES
        return isinstance(value, types.FunctionType) or name in known

    return not around and attributes <= known and all(map(is_known, of_globals))


# Whose functions do nothing but compute and count: a hook that calls no other is run on a copy.
_LIBRARIES = ("torch", "torchmetrics", "math", "numpy", "gc", "sklearn", "copy", "collections", "itertools")
_ACT = {"save", "load", "compile", "eval", "exec", "open", "input", "breakpoint", "exit", "quit", "help", "__import__"}
_ACT |= {"write", "vars", "globals", "locals", "__dict__"}  # the last four: by which a Trainer could be steered
_KNOWN = {
    *(name for of in (torch.Tensor, torch, functional, torch.linalg, list, dict, set, deque, str) for name in dir(of)),
    *(name for of in (copy, collections, itertools) for name in dir(of)),
    *("state_dict", "load_state_dict", "parameters", "named_parameters", "buffers", "named_buffers", "children"),
    *dir(builtins),
    *("log", "log_dict", "trainer", "current_epoch", "global_step", "sanity_checking", "is_global_zero", "training"),
    *_LIBRARIES,
    *("linalg", "fft", "special", "functional", "metrics", "update", "compute", "reset", "collect"),
} - _ACT
