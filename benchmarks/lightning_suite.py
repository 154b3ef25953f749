"""Run Lightning's own tests with a MemGuard in every Trainer, and name every difference.

    git clone --branch 2.6.5 --depth 1 https://github.com/Lightning-AI/pytorch-lightning lightning
    python benchmarks/lightning_suite.py lightning                     # every test of data/lightning_tests.txt
    python benchmarks/lightning_suite.py lightning --modes check --tests callbacks
    python benchmarks/lightning_suite.py lightning --select            # write data/lightning_tests.txt again

The checkout should be of the version of Lightning that is installed. Each test runs without MemGuard, with
``mode="check"`` and with ``mode="tune"``. Compared are its outcome, its warnings, and at the end of every fit, validate,
test and predict the weights, gradients, optimizers, metrics, random state, checkpoints, and whatever else can be seen of
the module, callbacks, loops, Trainer and process (`shared/lightning_plugin.py`).

Differences that are meant to be are in `data/lightning_differences.txt`, each with its reason. With ``mode="tune"``, a run
whose batch size was changed has other values; there, only the kind of error and the tests that fail without an assertion
about them count. The exit status is 0 if no other difference is left. Everything found goes to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS, KNOWN = HERE / "data" / "lightning_tests.txt", HERE / "data" / "lightning_differences.txt"
SLOWEST_SECONDS = 10.0  # without MemGuard, for a test to be in the list
TEST_SECONDS = 90.0  # then the process is ended
TESTS_A_PROCESS = 60
MOST_VARIANTS = 2  # of a parametrized test
# Not selected: they start processes, need data from the network or other hardware, or never run a Trainer.
LEFT_OUT = re.compile(
    r"tests_pytorch/(strategies|graveyard|accelerators|profilers|overrides|demos|helpers|deprecated_api|serve)/"
    r"|utilities/migration|trainer/connectors|test_cli|mnist|deepspeed|fsdp|spawn|ddp"
)


@dataclass
class Ran:
    """What became of a test."""

    outcome: str = "crashed"
    seconds: float = 0.0
    error: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)

    @property
    def was_tuned(self) -> bool:
        """Whether some run had another batch size than its loader's, or another accumulation."""
        return any(run["guard"] and run["guard"]["outcome"] == "tuned" for run in self.runs)


@dataclass(frozen=True)
class Difference:
    """One thing that is not as without MemGuard. ``kind`` is "outcome", "warnings", or of a run's state ("weights")."""

    test: str
    kind: str
    text: str
    known: str = ""


# -- running


@dataclass(frozen=True)
class Suite:
    """Lightning's tests in a checkout, and where their results go."""

    checkout: Path
    out: Path
    processes: int

    def run(self, mode: str, tests: Sequence[str], label: str = "") -> dict[str, Ran]:
        """Run tests in order, some in each process."""
        chunks = [list(tests[start : start + TESTS_A_PROCESS]) for start in range(0, len(tests), TESTS_A_PROCESS)]
        results: dict[str, Ran] = {}
        with ThreadPoolExecutor(self.processes) as pool:
            for done in pool.map(lambda job: self._run_chunk(mode, job[1], f"{job[0]:03}"), enumerate(chunks)):
                results |= done
                print(f"\r{label or mode}: {len(results)} of {len(tests)} tests", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        (self.out / f"{label or mode}.json").write_text(json.dumps({test: asdict(ran) for test, ran in results.items()}))
        return results

    def last(self, mode: str) -> dict[str, Ran]:
        """The results of the last time."""
        kept = json.loads((self.out / f"{mode}.json").read_text())
        return {test: Ran(**ran) for test, ran in kept.items()}

    def _run_chunk(self, mode: str, tests: list[str], name: str) -> dict[str, Ran]:
        """Go on after a test that ended the process."""
        results: dict[str, Ran] = {}
        while len(results) < len(tests):
            new = self._run_process(mode, [test for test in tests if test not in results], f"{name}_{len(results):03}")
            if not new:
                print(f"pytest did not run, see {self.out / mode}", file=sys.stderr)
                break
            results |= new
        return results

    def _run_process(self, mode: str, tests: list[str], name: str) -> dict[str, Ran]:
        folder = self.out / mode
        folder.mkdir(parents=True, exist_ok=True)
        listed, runs, scratch = folder / f"{name}.args", folder / f"{name}.jsonl", self.out / "scratch" / name
        for path in (scratch, scratch / "cwd"):  # the same paths in each mode
            shutil.rmtree(path, ignore_errors=True)
        (scratch / "cwd").mkdir(parents=True)
        listed.write_text("".join(f"{self.checkout}/{test}\n" for test in tests))
        runs.unlink(missing_ok=True)
        own = ["--runs", str(runs), "--guard", mode, "--test-seconds", str(TEST_SECONDS)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "shared.lightning_plugin", *own, *_PYTEST]
        command += ["-c", f"{self.checkout}/pyproject.toml", "--rootdir", str(self.checkout)]
        command += [f"--basetemp={scratch}/tmp", f"@{listed}"]
        with (folder / f"{name}.txt").open("w") as log:
            process = subprocess.Popen(
                command, cwd=scratch / "cwd", env=self._environment(), stdout=log, stderr=log, start_new_session=True
            )
            process.wait()
            try:
                os.killpg(process.pid, signal.SIGKILL)  # processes that a test left behind
            except ProcessLookupError:
                pass
        shutil.rmtree(scratch, ignore_errors=True)
        return read(runs)

    def _environment(self) -> dict[str, str]:
        given = os.environ.get("PYTHONPATH")
        path = [*([given] if given else []), str(HERE), str(self.checkout / "tests")]
        settings = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
        return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(path)}


_PYTEST = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest", "-o", "addopts=", "--tb=short", "--color=no")


def read(runs: Path) -> dict[str, Ran]:
    """Read what the plugin wrote: the tests that ran, and the one that ended the process."""
    results: dict[str, Ran] = {}
    for line in runs.read_text().splitlines() if runs.exists() else ():
        entry = json.loads(line)
        ran = results.setdefault(entry["test"], Ran())
        if entry["kind"] == "run":
            ran.runs.append(entry)
        elif entry["kind"] == "warnings":
            ran.warnings = entry["state"]
        elif entry["kind"] == "outcome" and ran.outcome in ("crashed", "passed"):
            ran.outcome, ran.seconds, ran.error = entry["outcome"], ran.seconds + entry["seconds"], entry["error"]
    return results


# -- comparing


def differences(test: str, without: Ran, guarded: Ran) -> Iterator[Difference]:
    """All that is not the same, one for each kind and run."""
    if without.outcome != guarded.outcome:
        yield Difference(test, "outcome", f"{without.outcome} -> {guarded.outcome}: {guarded.error}")
    changed = list(changes(without.warnings, guarded.warnings))
    if changed:
        yield Difference(test, "warnings", "; ".join(changed))
    if len(without.runs) != len(guarded.runs):
        yield Difference(test, "runs", f"{len(without.runs)} -> {len(guarded.runs)}")
    for before, after in zip(without.runs, guarded.runs, strict=False):
        where = f"{before['name']} ({before['run']})"
        if before["raised"] != after["raised"]:
            yield Difference(test, "raised", f"{where}: {before['raised'] or None} -> {after['raised'] or None}")
        for kind, state in before["state"].items():
            changed = list(changes(state, after["state"][kind]))
            if changed:
                more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
                yield Difference(test, kind, f"{where}: {'; '.join(changed[:4])}{more}")


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield f"{name}: {before.get(name)} -> {after.get(name)}"


def read_known() -> list[tuple[str, str, str, str]]:
    """Each line: the mode, the test, the kind and the reason; ``*`` stands for any text in the first three."""
    lines = [line for line in KNOWN.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(part.strip() for part in line.split("|", 3)) for line in lines]  # type: ignore[misc]


def explain(mode: str, difference: Difference, known: list[tuple[str, str, str, str]]) -> Difference:
    """The same, with the reason why it is meant to be, if it is in the list."""
    for a_mode, a_test, a_kind, reason in known:
        test = difference.test.replace("[", "(").replace("]", ")")  # brackets are patterns
        pattern = a_test.replace("[", "(").replace("]", ")")
        if fnmatch(mode, a_mode) and fnmatch(test, f"*{pattern}*") and fnmatch(difference.kind, a_kind):
            return Difference(difference.test, difference.kind, difference.text, reason)
    return difference


def is_count(difference: Difference, guarded: Ran) -> bool:
    """Whether a difference in a test with another batch size is one of values, not a new kind of error."""
    if not guarded.was_tuned or difference.kind in ("process", "runs"):
        return False
    if difference.kind == "outcome":
        return "assert" in difference.text.lower() or "DID NOT" in difference.text
    return difference.kind != "raised"


# -- selecting and reporting


def select(suite: Suite) -> None:
    """Write the list again: tests in which a Trainer runs, which pass, take little time, and end the same twice."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "shared.lightning_plugin", *_PYTEST]
    command += ["--runs", os.devnull, "-c", f"{suite.checkout}/pyproject.toml", "--rootdir", str(suite.checkout)]
    command += ["--continue-on-collection-errors", f"{suite.checkout}/tests/tests_pytorch"]
    listed = subprocess.run(command, env=suite._environment(), capture_output=True, text=True, check=False).stdout
    tests: list[str] = []
    variants = Counter[str]()
    for test in filter(lambda line: line.startswith("tests/") and not LEFT_OUT.search(line), listed.splitlines()):
        function = test.partition("[")[0]
        variants[function] += 1
        tests += [test] if "::" in test and variants[function] <= MOST_VARIANTS else []
    first = suite.run("none", tests, "first time")
    left_out, kept = Counter[str](), []
    for test in tests:
        ran = first.get(test, Ran())
        slow = ran.seconds > SLOWEST_SECONDS
        why = ran.outcome if ran.outcome != "passed" else "no Trainer runs" if not ran.runs else "slow" if slow else ""
        kept += [] if why else [test]
        left_out[why] += bool(why)
    second = suite.run("none", kept, "second time")
    same = [test for test in kept if not list(differences(test, first[test], second.get(test, Ran())))]
    left_out["not the same twice"] = len(kept) - len(same)
    (suite.out / "unstable.json").write_text(
        json.dumps([asdict(each) for test in kept for each in differences(test, first[test], second.get(test, Ran()))], indent=1)
    )
    TESTS.write_text("".join(f"{test}\n" for test in same))
    print(f"{len(same)} of {len(tests)} tests are in {TESTS}. Left out: {dict(+left_out)}")


def report(mode: str, without: dict[str, Ran], guarded: dict[str, Ran], suite: Suite) -> int:
    """Print the differences of a mode; the number of those that are not meant to be."""
    known, left, explained, counts = read_known(), [], [], []
    for test, ran in without.items():
        after = guarded.get(test, Ran())
        for difference in differences(test, ran, after):
            each = explain(mode, difference, known)
            (explained if each.known else counts if is_count(each, after) else left).append(each)
    verdicts = [run["guard"] for ran in guarded.values() for run in ran.runs]
    outcomes = Counter(guard["outcome"] if guard else "no setup" for guard in verdicts)
    aside = Counter(guard["reason"] for guard in verdicts if guard and guard["outcome"] in ("stepped aside", "kept"))
    print(f"\nmode={mode!r}: {len(guarded)} tests, {len(verdicts)} runs; decisions: {dict(outcomes.most_common())}")
    for reason, count in aside.most_common():
        print(f"{count:6} not tuned: {reason}")
    for title, some in (("meant to be", explained), ("batch and epoch counts", counts), ("NOT EXPLAINED", left)):
        kinds = Counter(each.kind for each in some)
        print(f"  {title}: {len(some)} differences in {len({each.test for each in some})} tests {dict(kinds.most_common())}")
    for test, group in groupby(left, key=lambda each: each.test):
        print(f"\n{test}")
        for each in group:
            print(f"    {each.kind}: {each.text[:600]}")
    found = {"meant": explained, "counts": counts, "left": left}
    summary = {"outcomes": outcomes, "aside": aside, **{name: [asdict(each) for each in some] for name, some in found.items()}}
    (suite.out / f"{mode}_differences.json").write_text(json.dumps(summary, indent=1) + "\n")
    return len(left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning's repository")
    parser.add_argument("--modes", nargs="+", choices=("check", "tune"), default=["check", "tune"])
    parser.add_argument("--tests", default="", metavar="TEXT", help="only tests with this text in their name")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/lightning_suite"))
    parser.add_argument("--keep", action="store_true", help="take the results without MemGuard of the last time")
    parser.add_argument("--select", action="store_true", help="write the list of tests again")
    options = parser.parse_args()
    suite = Suite(options.checkout.resolve(), options.out.resolve(), options.processes)
    if options.select:
        select(suite)
        return 0
    tests = [test for test in TESTS.read_text().splitlines() if options.tests in test]
    without = suite.last("without") if options.keep else suite.run("none", tests, "without")
    left = sum(report(mode, without, suite.run(mode, tests), suite) for mode in options.modes)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
