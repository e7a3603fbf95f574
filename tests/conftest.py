"""What every test may use, where tests run, and which of them `make test` runs."""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardwise.planner import sheets
from shardwise.planner.seconds import rates
from shardwise.planner.seconds.constants import shipped
from shardwise.prove.pool import RankPool
from shardwise.techniques.variant import Variant
from tests.covering import covering

set_hypothesis_home_dir(Path(__file__).parents[1] / ".hypothesis")  # or it would be made where the first test stands


for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:  # of a shell's background job, under nohup: runs would ignore it too
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_configure() -> None:
    """A busy machine is no failure: examples have no time limit of their own, tests have."""
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")


LONG = (
    "tests/parity/test_tp_pairwise.py",
    "tests/parity/test_tp_compile.py",
    "tests/runtime/checkpoint/test_save.py",
    "tests/runtime/test_loop.py",
    "tests/faults/test_stops.py",
    "tests/faults/test_tp.py",
    "tests/faults/test_axes.py",
    "tests/parity/test_cp_pairwise.py",
    "tests/parity/test_cp_field.py",
    "tests/faults/test_kills.py",
    "tests/drift/test_real_steps.py",
    "tests/prove/test_pool.py",
    "tests/runtime/test_own.py",
    "tests/drift/test_tp.py",
    "tests/planner/test_spans.py",
    "tests/runtime/test_build.py",
    "tests/parity/test_fp64.py",
    "tests/parity/test_field.py",
    "tests/faults/test_hangs.py",
    "tests/techniques/optim/test_rounding.py",
)
"""Files that take longest, the longest first."""
SHARE = 16
"""One case in so many, and at least one, is run of what proves before every change; the others now and then."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``matrix(n)``, `make test` runs one case in n. Of one marked ``matrix`` or ``prove``, `make
    prove` runs one case in SHARE, of one marked ``rare(n)`` one in n; what is left is marked ``big``. Long files come
    first, so that no worker is left with one at the end."""
    tests: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        matrix, rare, prove = (cases[0].get_closest_marker(name) for name in ("matrix", "rare", "prove"))
        if matrix or rare or prove:
            values = [tuple(map(str, case.callspec.params.values())) for case in cases]
            tested = sample(values, *matrix.args) if matrix and matrix.args else set[int]()
            proved = sample(values, *(rare.args if rare else (SHARE,)))
            for place, case in enumerate(cases):
                if place not in tested:
                    case.add_marker("prove" if place in proved else "big")
    items.sort(key=lambda item: LONG.index(path) if (path := item.nodeid.partition("::")[0]) in LONG else len(LONG))


def sample(cases: list[tuple[str, ...]], n: int) -> set[int]:
    """Places of one case in ``n``: where each case has values of its own every nth, else those that meet most pairs."""
    if all(len(set(values)) == len(cases) for values in zip(*cases, strict=True)):
        return set(range(0, len(cases), n))
    return set(covering(cases)[: -(-len(cases) // n)])


def pytest_collection_finish() -> None:
    """What the tests' modules have imported is never garbage, and an eighth of the time was spent looking for some."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests run in an empty directory, so that none depends on what lies where they were started."""
    before, empty = Path.cwd(), tmp_path_factory.mktemp("empty")
    os.chdir(empty)
    yield empty
    os.chdir(before)


@pytest.fixture(autouse=True)
def _leaves_nothing(_elsewhere: Path) -> Iterator[None]:
    """A test that writes where it stands asks for a directory of its own: ``monkeypatch.chdir(tmp_path)``."""
    yield
    left = sorted(path.name for path in _elsewhere.iterdir())
    assert not left, f"this test, or what it started, wrote into the working directory: {left}"


@pytest.fixture(autouse=True)
def _watches_nothing() -> Iterator[None]:
    """What a test, or what failed in it, left watching every operation would break the tests after it."""
    yield
    assert not (left := _get_current_dispatch_mode_stack()), f"left by this test: {left}"


@pytest.fixture(scope="session")
def _states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of its own for each test, made once something is remembered there."""
    directory = tmp_path_factory.mktemp("states")
    return (directory / str(number) for number in count())


@pytest.fixture(autouse=True)
def _remembers_elsewhere(_states: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs took is kept for later plans: no test finds what another left, or the user's own runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(next(_states)))


@pytest.fixture(autouse=True)
def _traced_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that do not ship are traced in this process, where no process group lives: starting one takes seconds."""

    def traced(variants: list[Variant], kept_in: Path) -> list[Any]:
        from shardwise.planner.trace import traced_here

        return [sheets.pack_unit(unit) for unit in traced_here(variants).values()]

    monkeypatch.setattr(sheets, "traced_anew", traced)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four gloo ranks that live through the whole test run (one pool for each pytest worker)."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture
def by_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been measured on any device, and our steps are those of published runs: for tests that compute by
    hand what the table says of both."""
    monkeypatch.setattr(rates, "measured_on", lambda name: None)
    monkeypatch.setitem(shipped(), "own era", shipped()["era:fsdp2"])
