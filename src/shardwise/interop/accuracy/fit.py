"""Fits the constants behind seconds to published measurements: ``python -m shardwise.interop.accuracy.fit FILE.csv [-o
constants.csv]``.

Least squares of log(predicted / measured), robust against rows that no constant explains, with a prior on each constant
(Gauss-Newton, derivatives by differences). A source counts as the square root of its rows. What a source's rows would
be predicted as without it is found from the same derivatives; its quantiles are the band that plans come with.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.interop.accuracy.rows import Measurement, read, said
from shardwise.interop.accuracy.score import groups_of, measured_s, predicted_s, rows_of
from shardwise.planner.seconds.constants import replaced, rows, shipped

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
    others["own era"] = values.get("era:fsdp2")
    return {**values, **{name: value for name, value in others.items() if value is not None}}


def touches(name: str, row: Measurement) -> bool:
    """Whether a row can depend on a constant."""
    if name.startswith("era:"):
        return row.habits.era == name[4:]
    if name.startswith("best product:"):
        device = row.cluster.device.name
        return FOLLOWS.get(device, device) == name[13:]
    return True


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


def fitted(data: list[tuple[Measurement, float]], priors: dict[str, tuple[float, float, float]]) -> tuple[Values, Any]:
    """The constants, and the residual of each row without its source. ``priors``: value, prior and sigma of each."""
    values = {name: value for name, (value, _, _) in priors.items()}
    prior, sigma = (np.array([each[i] for each in priors.values()]) for i in (1, 2))
    for _ in range(ROUNDS):
        at = residuals(data, values)
        slopes = derivatives(data, values, at)
        away = np.log(np.array([*values.values()]) / prior)
        moved = np.clip(solved(slopes, at, weights(data, at), (away, sigma)), -0.3, 0.3)
        values = dict(zip(values, np.array([*values.values()]) * np.exp(moved), strict=True))
    at, away = residuals(data, values), np.log(np.array([*values.values()]) / prior)
    left = at.copy()
    sources = np.array([row.source for row, _ in data])
    for source in {*sources}:
        mine = sources == source
        without = solved(slopes[~mine], at[~mine], weights(data, at)[~mine], (away, sigma))
        left[mine] = at[mine] + slopes[mine] @ without
    return values, left


def band(data: list[tuple[Measurement, float]], left: Any) -> Values:
    """The 80 % quantiles between sources (of their medians) and within them, of pre-training and of fine-tuning."""
    found, sources = {}, np.array([row.source for row, _ in data])
    tuned = np.array(["fine_tune" in groups_of(row) for row, _ in data])
    for mine, words in ((~tuned, ""), (tuned, " fine-tune")):
        if not mine.any():
            continue  # the file has none: what was known stays
        medians = {source: np.median(left[mine & (sources == source)]) for source in {*sources[mine]}}
        within = np.abs(left[mine] - np.array([medians[source] for source in sources[mine]]))
        found[f"band source{words}"] = float(np.quantile(np.abs([*medians.values()]), QUANTILE))
        found[f"band row{words}"] = float(np.quantile(within, QUANTILE))
    return found


def covered(data: list[tuple[Measurement, float]], left: Any, values: Values) -> float:
    """The share of rows that lie in the band of what is predicted without their source."""
    words = [" fine-tune" if "fine_tune" in groups_of(row) else "" for row, _ in data]
    width = np.array([np.hypot(values[f"band source{each}"], values[f"band row{each}"]) for each in words])
    return float(np.mean((left <= width) & (-left <= SLOW * width)))


def main() -> None:
    """Fit, say how far each constant moved, and write."""
    parser = argparse.ArgumentParser(description="Fit the constants behind seconds to published measurements.")
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    data, lines = rows_to_fit(given.file), rows()
    free = {
        line["constant"]: (float(line["value"]), float(line["prior"]), float(line["sigma"]))
        for line in lines
        if line["prior"] and any(touches(line["constant"], row) for row, _ in data)
    }
    free = {name: prior for name, prior in free.items() if name.removeprefix("best product:") not in FOLLOWS}
    values, left = fitted(data, free)
    values = whole(values) | band(data, left)
    for name, (before, prior, sigma) in free.items():
        moved = np.log(values[name] / prior) / sigma
        print(f"{name:34} {before:12.4g} -> {values[name]:12.4g}   {moved:+.2f} sigma from its prior")
    print({name: round(value, 3) for name, value in values.items() if name.startswith("band")})
    print(f"{covered(data, left, values):.0%} of the rows lie in the band of what is predicted without their source")
    if given.out:
        text = io.StringIO()
        writer = csv.DictWriter(text, [*lines[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            line | {"value": f"{values.get(line['constant'], float(line['value'])):.4g}"} for line in lines
        )
        given.out.write_text(text.getvalue())


if __name__ == "__main__":
    main()
