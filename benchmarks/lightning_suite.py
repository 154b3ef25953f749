"""Run Lightning's own tests with a MemGuard in every Trainer, and name every difference.

    git clone --branch 2.6.5 --depth 1 https://github.com/Lightning-AI/pytorch-lightning build/lightning
    python benchmarks/lightning_suite.py build/lightning                      # the tests of data/lightning_tests.txt
    python benchmarks/lightning_suite.py build/lightning --modes check --tests callbacks
    python benchmarks/lightning_suite.py build/lightning --select             # write that list again

The checkout should be of the version of Lightning that is installed. Each test runs without MemGuard, with ``check``
and with ``tune``. Compared are its outcome, its warnings, and after every fit, validate, test and predict the weights,
gradients, optimizers, metrics, random state, checkpoints, and all else that can be seen of the module, callbacks,
loops, Trainer and process (`shared/lightning_plugin.py`).

A tuned run has other batches. It is compared with a run without MemGuard whose loaders are given the same batch sizes.
Differences that are meant to be are in `data/lightning_differences.txt`, each with its reason. Exit status 0: no other
difference is left.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS, KNOWN = HERE / "data" / "lightning_tests.txt", HERE / "data" / "lightning_differences.txt"
TESTS_A_PROCESS, TEST_SECONDS = 40, 300.0
SIZES = "sizes.json"  # what each run was tuned to
# What is selected: tests of less than this many seconds, at most so many of a parametrized one, and none that start
# processes, need data from the network or other hardware, or never run a Trainer.
SLOWEST_SECONDS, MOST_VARIANTS = 10.0, 3
LEFT_OUT = re.compile(
    r"tests_pytorch/(strategies|graveyard|accelerators|profilers|overrides|demos|helpers|deprecated_api|serve)/"
    r"|utilities/migration|trainer/connectors|test_cli|mnist|deepspeed|fsdp|spawn|ddp"
)
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "--tb=short", "--color=no", "-o", "addopts=", "-p", "no:cacheprovider"),
    *("-p", "no:xdist", "-p", "no:hypothesispytest", "-p", "shared.lightning_plugin"),
)


@dataclass
class Ran:
    """The outcome of a test: how it ended, and how each run of a Trainer in it did."""

    outcome: str = "crashed"
    seconds: float = 0.0
    error: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        return [run["guard"] for run in self.runs if run["guard"]]


@dataclass(frozen=True)
class Difference:
    """A difference from the run without MemGuard; ``kind`` says of what, such as "outcome" or "weights"."""

    test: str
    kind: str
    text: str
    reason: str = ""


@dataclass(frozen=True)
class Suite:
    """Lightning's tests in a checkout, and the folder for their results."""

    checkout: Path
    out: Path
    processes: int

    def run(self, mode: str, tests: Sequence[str]) -> dict[str, Ran]:
        """Run tests, in order, some in each process."""
        starts = range(0, len(tests), TESTS_A_PROCESS)
        results: dict[str, Ran] = {}
        with ThreadPoolExecutor(self.processes) as pool:
            for done in pool.map(lambda start: self._run(mode, tests[start : start + TESTS_A_PROCESS], start), starts):
                results |= done
                print(f"\r{mode}: {len(results)} of {len(tests)} tests", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return results

    def _run(self, mode: str, tests: Sequence[str], start: int) -> dict[str, Ran]:
        results: dict[str, Ran] = {}
        while len(results) < len(tests):  # goes on after a test that ended its process
            name = f"{start:04}-{len(results):02}"
            new = self._run_process(mode, [test for test in tests if test not in results], name)
            if not new:
                raise SystemExit(f"pytest did not run, see {self.out / mode / name}.txt")
            results |= new
        return results

    def _run_process(self, mode: str, tests: Sequence[str], name: str) -> dict[str, Ran]:
        folder, scratch = self.out / mode, self.out / "scratch" / name.partition("-")[0]  # the same in each mode
        shutil.rmtree(scratch, ignore_errors=True)
        for each in (folder, scratch / "cwd"):
            each.mkdir(parents=True, exist_ok=True)
        listed, runs, log = (folder / f"{name}.{suffix}" for suffix in ("args", "jsonl", "txt"))
        listed.write_text("".join(f"{self.checkout}/{test}\n" for test in tests))
        runs.unlink(missing_ok=True)
        own = ["--runs", str(runs), "--guard", mode, "--test-seconds", str(TEST_SECONDS), f"--basetemp={scratch}/tmp"]
        if mode == "sized":
            own += ["--sizes", str(self.out / SIZES)]
        with log.open("w") as file:
            process = subprocess.Popen(
                [*PYTEST, *self.place, *own, f"@{listed}"],
                cwd=scratch / "cwd",
                env=self.environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a test left running
        shutil.rmtree(scratch, ignore_errors=True)
        return read(runs)

    @property
    def place(self) -> list[str]:
        return ["-c", f"{self.checkout}/pyproject.toml", "--rootdir", str(self.checkout)]

    @property
    def environment(self) -> dict[str, str]:
        path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE), str(self.checkout / "tests")]
        settings = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
        return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(path)}


def read(runs: Path) -> dict[str, Ran]:
    """Read what the plugin wrote."""
    results: dict[str, Ran] = {}
    for line in runs.read_text().splitlines() if runs.exists() else ():
        entry = json.loads(line)
        ran = results.setdefault(entry["test"], Ran())
        if entry["kind"] == "run":
            ran.runs.append(entry)
        elif entry["kind"] == "warnings":
            ran.warnings = entry["state"]
        elif entry["kind"] == "outcome" and ran.outcome in ("crashed", "passed"):  # one for each phase that fails
            ran.outcome, ran.seconds, ran.error = entry["outcome"], entry["seconds"], entry["error"]
    return results


# -- comparing


def differences(test: str, without: Ran, guarded: Ran) -> Iterator[Difference]:
    """All that is not the same, one for each kind and run."""
    if without.outcome != guarded.outcome:
        yield Difference(test, "outcome", f"{without.outcome} -> {guarded.outcome}: {guarded.error}")
    if without.warnings != guarded.warnings:
        yield Difference(test, "warnings", changes(without.warnings, guarded.warnings))
    if len(without.runs) != len(guarded.runs) and without.outcome == guarded.outcome:
        yield Difference(test, "runs", f"{len(without.runs)} -> {len(guarded.runs)}")
    for number, (before, after) in enumerate(zip(without.runs, guarded.runs, strict=False)):
        where = f"{before['name']} ({number})"
        if before["raised"] != after["raised"]:
            yield Difference(test, "raised", f"{where}: {before['raised'] or None} -> {after['raised'] or None}")
        for kind, state in before["state"].items():
            if state != after["state"][kind]:
                yield Difference(test, kind, f"{where}: {changes(state, after['state'][kind])}")


def changes(before: dict[str, str], after: dict[str, str]) -> str:
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return "; ".join(f"{name}: {before.get(name)} -> {after.get(name)}" for name in names)[:1500]


def explained(mode: str, difference: Difference) -> Difference:
    """The difference with the reason why it is meant to be; without one where it is not in the list.

    A line of the list: ``mode | kind | part of the test's name | part of the text | reason``; each may be empty.
    """
    for line in KNOWN.read_text().splitlines():
        if line.count("|") < 4:
            continue
        a_mode, kind, test, text, reason = (part.strip() for part in line.split("|", 4))
        if (
            a_mode in ("", mode)
            and kind in ("", difference.kind)
            and test in difference.test
            and text in difference.text
        ):
            return replace(difference, reason=reason)
    return difference


def report(mode: str, without: dict[str, Ran], guarded: dict[str, Ran], out: Path) -> int:
    """Print the differences; the number of those that are not meant to be."""
    groups: dict[str, list[Difference]] = {"meant to be": [], "NOT EXPLAINED": []}
    for test, ran in guarded.items():
        for difference in (explained(mode, each) for each in differences(test, without[test], ran)):
            groups["meant to be" if difference.reason else "NOT EXPLAINED"].append(difference)
    verdicts = [verdict for ran in guarded.values() for verdict in ran.verdicts]
    decided = Counter(f"{verdict['outcome']} ({verdict['method']})" for verdict in verdicts)
    aside = Counter(
        verdict["reason"]
        for verdict in verdicts
        if verdict["outcome"] in ("stepped aside", "kept") or verdict["method"] == "states"
    )
    print(f"\n{mode}: {len(guarded)} tests, {sum(len(ran.runs) for ran in guarded.values())} runs; {dict(decided)}")
    print("".join(f"{count:6} x {reason}\n" for reason, count in aside.most_common()), end="")
    for name, found in groups.items():
        kinds = Counter(each.reason or each.kind for each in found)
        print(f"{name}: {len(found)} in {len({each.test for each in found})} tests; {dict(kinds.most_common())}")
    for test, found in groupby(groups["NOT EXPLAINED"], key=lambda each: each.test):
        print(f"\n{test}", *(f"    {each.kind}: {each.text[:400]}" for each in found), sep="\n")
    listed = {name: [asdict(each) for each in found] for name, found in groups.items()}
    summary = {"decided": decided, "stepped aside": aside, **listed}
    (out / f"{mode}.json").write_text(json.dumps(summary, indent=1) + "\n")
    return len(groups["NOT EXPLAINED"])


# -- selecting


def select(suite: Suite) -> None:
    """Write the list again: tests in which a Trainer runs, that pass, are fast, and end the same twice."""
    command = [*PYTEST, *suite.place, "--collect-only", f"{suite.checkout}/tests/tests_pytorch"]
    listed = subprocess.run(command, env=suite.environment, capture_output=True, text=True, check=False).stdout
    tests = re.findall(r"^tests/.*::.*", listed, re.MULTILINE)
    variants = [list(group) for _, group in groupby(tests, key=lambda test: test.partition("[")[0])]
    tests = [test for group in variants for test in group[:MOST_VARIANTS] if not LEFT_OUT.search(test)]
    first = suite.run("none", tests)
    kept = [
        test
        for test in tests
        if (ran := first[test]).outcome == "passed" and ran.runs and ran.seconds < SLOWEST_SECONDS
    ]
    second = suite.run("none", kept)
    same = [test for test in kept if not any(differences(test, first[test], second[test]))]
    TESTS.write_text("".join(f"{test}\n" for test in same))
    outcomes = Counter(ran.outcome for ran in first.values())
    print(
        f"{len(tests)} tests {dict(outcomes)}: {len(kept)} run a Trainer and are fast, {len(same)} end the same twice"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning's repository")
    parser.add_argument("--modes", nargs="+", choices=("check", "tune"), default=["check", "tune"])
    parser.add_argument("--tests", default="", metavar="TEXT", help="only tests with this text in their name")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/lightning_suite"), help="a folder for all results")
    parser.add_argument("--select", action="store_true", help="write the list of tests again")
    options = parser.parse_args()
    if not (options.checkout / "tests" / "tests_pytorch").is_dir():
        parser.error(f"{options.checkout} is not a checkout of Lightning's repository; see --help for how to get one")
    suite = Suite(options.checkout.resolve(), options.out.resolve(), options.processes)
    if options.select:
        select(suite)
        return 0
    tests = [test for test in TESTS.read_text().splitlines() if options.tests in test]
    without = suite.run("none", tests)
    unexplained = 0
    for mode in options.modes:
        guarded, baseline = suite.run(mode, tests), without
        if mode == "tune":
            sizes = {test: [run["guard"] for run in ran.runs] for test, ran in guarded.items()}
            (suite.out / SIZES).write_text(json.dumps(sizes))
            baseline = suite.run("sized", tests)
        unexplained += report(mode, baseline, guarded, suite.out)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
