"""Fits the constants behind seconds to published measurements: ``python -m bench.accuracy.fit FILE.csv [-o
constants.csv]``.

Least squares of log(predicted / measured), robust against rows that no constant explains, with a prior on each constant
(Gauss-Newton, derivatives by differences). A source counts as the square root of its rows. Then each source's rows are
predicted by constants that are fitted without it, with the same derivatives; the quantiles of what those are off by are
the band that plans come with.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.accuracy.rows import Measurement, read, said
from bench.accuracy.score import as_csv, groups_of, measured_s, predicted_s, rows_of
from shardwise.errors import ShardwiseError
from shardwise.planner.seconds.constants import rows, shipped

Values = dict[str, float]
NOISE = 0.08
"""In logs, of a row that the model describes: larger residuals count less and less."""
STEP, ROUNDS, QUANTILE = 0.02, 4, 0.8
SLOW = shipped()["band slow"]
FOLLOWS = {"H200-SXM": "H100-SXM-80GB", "V100-SXM2-32GB": "V100-SXM2-16GB"}
"""Devices with the chip of another."""


def rows_to_fit(path: Path) -> list[tuple[Measurement, float]]:
    """The rows of a file whose seconds are compared, and their seconds."""
    found = []
    for text in rows_of(path):
        row = read(text)
        if not isinstance(row, str) and said(text, "outcome").upper() != "OOM" and (seconds := measured_s(row)):
            found.append((row, seconds))
    return found


@contextmanager
def replaced(values: Mapping[str, float]) -> Iterator[None]:
    """Within it, these constants have other values."""
    known = shipped()
    before = dict(known)
    known.update(values)
    try:
        yield
    finally:
        known.update(before)


def residuals(data: list[tuple[Measurement, float]], values: Values) -> np.ndarray[Any, Any]:
    """log(predicted / measured) of each row; nothing of one that cannot be priced."""
    found = []
    with replaced(whole(values)):
        for row, seconds in data:
            try:
                found.append(np.log((predicted_s(row) or seconds) / seconds))
            except ShardwiseError:
                found.append(0.0)
    return np.array(found)


def whole(values: Values) -> Values:
    """The values with those that follow from them."""
    others = {f"best product:{to}": values.get(f"best product:{of}") for to, of in FOLLOWS.items()}
    return {**values, **{name: value for name, value in others.items() if value is not None}}


def touches(name: str, row: Measurement) -> bool:
    """Whether a row can depend on a constant."""
    device, (kind, _, which) = row.cluster.device.name, name.partition(":")
    own = {"era": row.habits.era, "best product": FOLLOWS.get(device, device)}
    return kind not in own or own[kind] == which


def derivatives(data: list[tuple[Measurement, float]], values: Values, at: Any) -> np.ndarray[Any, Any]:
    """Of each residual by the log of each constant."""
    found = np.zeros((len(data), len(values)))
    for j, name in enumerate(values):
        some = [i for i, (row, _) in enumerate(data) if touches(name, row)]
        moved = values | {name: values[name] * float(np.exp(STEP))}
        found[some, j] = (residuals([data[i] for i in some], moved) - at[some]) / STEP
    return found


def weights(data: list[tuple[Measurement, float]], at: Any) -> np.ndarray[Any, Any]:
    """What each row counts: its share of its source, less where it is far off."""
    count = Counter(row.source for row, _ in data)
    share = np.array([count[row.source] ** -0.5 for row, _ in data])
    return share / share.mean() / (1 + (at / (2 * NOISE)) ** 2)


def solved(slopes: Any, at: Any, weight: Any, prior: tuple[Any, Any]) -> np.ndarray[Any, Any]:
    """How far the logs of the constants move. ``prior``: how far they are from it, and how far they may be."""
    away, sigma = prior
    matrix = slopes.T @ (weight[:, None] * slopes) / NOISE**2 + np.diag(sigma**-2.0)
    return -np.linalg.solve(matrix, slopes.T @ (weight * at) / NOISE**2 + away * sigma**-2.0)


def nearer(data: list[tuple[Measurement, float]], values: Values, slopes: Any, known: Any) -> Values:
    """The constants after one step. ``known``: the prior and the sigma of each."""
    at, (prior, sigma), now = residuals(data, values), known, np.array([*values.values()])
    moved = solved(slopes, at, weights(data, at), (np.log(now / prior), sigma))
    return dict(zip(values, now * np.exp(np.clip(moved, -0.3, 0.3)), strict=True))


def fitted(data: list[tuple[Measurement, float]], priors: dict[str, tuple[float, float, float]]) -> tuple[Values, Any]:
    """The constants, and the residual of each row where all constants are fitted without its source. ``priors``: value,
    prior and sigma of each."""
    values = {name: value for name, (value, _, _) in priors.items()}
    known = [np.array([each[i] for each in priors.values()]) for i in (1, 2)]
    for _ in range(ROUNDS):
        slopes = derivatives(data, values, residuals(data, values))
        values = nearer(data, values, slopes, known)
    left, sources = np.zeros(len(data)), np.array([row.source for row, _ in data])
    for source in {*sources}:
        others, without = [each for each in data if each[0].source != source], values
        for _ in range(ROUNDS):
            without = nearer(others, without, slopes[sources != source], known)
        left[sources == source] = residuals([each for each in data if each[0].source == source], without)
    return values, left


def band(data: list[tuple[Measurement, float]], left: Any) -> Values:
    """The 80 % quantiles between sources (of their medians) and within them, of pre-training and of fine-tuning."""
    found, sources = {}, np.array([row.source for row, _ in data])
    for words, mine in alike(data).items():
        medians = {source: np.median(left[mine & (sources == source)]) for source in {*sources[mine]}}
        within = np.abs(left[mine] - np.array([medians[source] for source in sources[mine]]))
        found[f"band source{words}"] = float(np.quantile(np.abs([*medians.values()]), QUANTILE))
        found[f"band row{words}"] = float(np.quantile(within, QUANTILE))
    return found


def alike(data: list[tuple[Measurement, float]]) -> dict[str, np.ndarray[Any, Any]]:
    """Which rows each band is for, by what its name ends with; of a kind that the file has."""
    tuned = np.array(["fine_tune" in groups_of(row) for row, _ in data])
    return {words: mine for words, mine in (("", ~tuned), (" fine-tune", tuned)) if mine.any()}


def covered(data: list[tuple[Measurement, float]], left: Any, values: Values) -> tuple[float, float]:
    """The share of rows that lie in the band of what is predicted without their source, and the mean of the sources'
    shares."""
    width = np.zeros(len(data))
    for words, mine in alike(data).items():
        width[mine] = np.hypot(values[f"band source{words}"], values[f"band row{words}"])
    within, sources = (left <= width) & (-left <= SLOW * width), np.array([row.source for row, _ in data])
    return float(np.mean(within)), float(np.mean([np.mean(within[sources == source]) for source in {*sources}]))


def main() -> None:
    """Fit, say how far each constant moved, and write."""
    parser = argparse.ArgumentParser(description="Fit the constants behind seconds to published measurements.")
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--only", default="", help="constants whose names begin so; the others stay")
    given = parser.parse_args()
    data, lines = rows_to_fit(given.file), rows()
    free: dict[str, tuple[float, float, float]] = {}
    for line in lines:
        name = line["constant"]
        if not name.startswith(given.only):
            continue
        if line["prior"] and name.partition(":")[2] not in FOLLOWS and any(touches(name, row) for row, _ in data):
            free[name] = float(line["value"]), float(line["prior"]), float(line["sigma"])
    values, left = fitted(data, free)
    values = whole(values) | band(data, left)
    for name, (before, prior, sigma) in free.items():
        moved = np.log(values[name] / prior) / sigma
        print(f"{name:34} {before:12.4g} -> {values[name]:12.4g}   {moved:+.2f} sigma from its prior")
    print({name: round(value, 3) for name, value in values.items() if name.startswith("band")})
    for words, mine in alike(data).items():
        off = np.quantile(100 * np.abs(np.expm1(left[mine])), (0.5, 0.9)).round(2)
        print(f"error in %, all constants from other sources{words}: median and p90 {off}")
    print("the band holds {:.0%} of rows without their source, {:.0%} by source".format(*covered(data, left, values)))
    if given.out:
        for line in lines:
            line["value"] = f"{values.get(line['constant'], float(line['value'])):.4g}"
        given.out.write_text(as_csv([*lines[0]], lines))


if __name__ == "__main__":
    main()
