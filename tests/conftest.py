"""If only one of the two Lightning packages is installed, the tests of the other run on it.

`lightning.pytorch` and `pytorch_lightning` hold the same code under two names. Most tests need any Lightning, and
import `pytorch_lightning`; a few compare the two. In an environment with one of them, as ``make matrix`` makes them, a
stand-in of the absent name hands out what the present one has, and what is parametrised over both skips the absent one.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import tape
from tests.files import ONE_WORKER

# An example is not wrong because the machine does other work too.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# By the package that may be absent: its names, and where the other package has the same code.
_PRESENT_OF = {
    "lightning": {
        "lightning": "pytorch_lightning",
        "lightning.pytorch": "pytorch_lightning",
        "lightning.fabric": "lightning_fabric",
    },
    "pytorch_lightning": {
        "pytorch_lightning": "lightning.pytorch",
        "lightning_fabric": "lightning.fabric",
    },
}


class _StandIn(ModuleType):
    """A package that is not there: under its own name, what another package holds."""

    def __init__(self, name: str, present: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._present = importlib.import_module(present)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._present, name)


class _StandInFinder(MetaPathFinder, Loader):
    """Finds a stand-in for each absent package, and for a module in one the very module of the present package."""

    def __init__(self, present_of: dict[str, str]) -> None:
        self._present_of = present_of

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        known = [absent for absent in self._present_of if f"{name}.".startswith(f"{absent}.")]
        if not known:
            return None
        absent = max(known, key=len)
        return ModuleSpec(name, self, origin=self._present_of[absent] + name.removeprefix(absent))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        if spec.name in self._present_of:
            return _StandIn(spec.name, spec.origin)
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it ran under its own name. The import system has given it our spec; it gets its own back."""
        if not isinstance(module, _StandIn):
            assert module.__spec__ is not None
            module.__spec__ = module.__spec__.loader_state


_ABSENT = [name for name in _PRESENT_OF if importlib.util.find_spec(name) is None]

if len(_ABSENT) == 1:
    # First what is tested: MemGuard asks which packages there are when it is imported, and must see what users' does.
    importlib.import_module("lightning_memguard.training.run.callback")
    sys.meta_path.append(_StandInFinder(_PRESENT_OF[_ABSENT[0]]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in ONE_WORKER)  # first what cannot be divided among workers
    if len(_ABSENT) != 1:
        return
    (absent,) = _ABSENT

    def names_it(value: object) -> bool:
        return isinstance(value, _StandIn) or (isinstance(value, str) and value in _PRESENT_OF[absent])

    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and any(map(names_it, parameters.params.values())):
            item.add_marker(pytest.mark.skip(reason=f"`{absent}` is not installed"))
        elif item.path.name == "test_examples.py" and absent == "pytorch_lightning":
            item.add_marker(pytest.mark.skip(reason=f"the examples import `{absent}`, which is not installed"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As ``--dist loadgroup``, which finds no groups under pytest 9.2 (pytest-xdist 3.8).

    By function: handed out one at a time, tests of milliseconds leave their workers waiting.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if Path(file).name in ONE_WORKER else nodeid.partition("[")[0]

    config.option.loadscopereorder = False  # tests of a file stay together, which share its fixtures
    return Scheduler(config, log)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A training leaves its report where it runs."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _versions_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line about newer versions is not part of what tests compare: the canary runs them on unreleased ones."""
    monkeypatch.setattr("lightning_memguard.training.run.callback.untested", str)


@pytest.fixture
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures run in this process, as in a child, but in a test marked `children`: a test sees them, and is faster."""
    from tests.warm import capture_here

    if not request.node.get_closest_marker("children"):
        capture_here(monkeypatch.setattr)


@pytest.fixture(scope="module")
def all_here() -> Iterator[None]:
    """As `here`, for all tests of a file and what they share."""
    from tests.warm import capture_here

    with pytest.MonkeyPatch.context() as monkeypatch:
        capture_here(monkeypatch.setattr)
        yield


@pytest.fixture
def taped(request: pytest.FixtureRequest, here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured, but in a test marked `captures`: any step is that of a small training, from its tapes."""
    if not request.node.get_closest_marker("captures"):
        monkeypatch.setattr("lightning_memguard.core.capture.capture.capture_here", tape.played)


@pytest.fixture
def played(here: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Have nothing captured: any step is that of a small training, from its tapes, as a function changes its trace."""

    def play(change: Callable[[Any], Any]) -> None:
        path = "lightning_memguard.core.capture.capture.capture_here"
        monkeypatch.setattr(path, lambda *asked, **how: change(tape.played(*asked, **how)))

    return play


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    from tests.warm import warm

    warm()


@pytest.fixture(scope="module", autouse=True)
def _not_searched(_warm: None) -> None:
    """Objects of earlier tests and of imports are not searched for garbage by each collection from now on."""
    gc.collect()
    gc.freeze()
