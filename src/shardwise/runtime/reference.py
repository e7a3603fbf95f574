"""The initial model's scores of each pair of answers, where the method has a reference: computed once before the first
step, then a number an answer in a file beside the checkpoints, so that no second model is kept (docs/decisions/0007).

A run that goes on reads the file. Pairs that it has not scored yet, because the run is to be longer, are scored by the
initial weights, which are in memory until the checkpoint is loaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from shardwise.data.pack import Packs
from shardwise.data.stream import evaluation
from shardwise.errors import DataError, Problem
from shardwise.methods.pairs import answers_of
from shardwise.models import peft, tensorfile
from shardwise.runtime.build import weights_directory
from shardwise.runtime.checkpoint.manifest import candidates
from shardwise.runtime.evaluate import scored
from shardwise.runtime.job import Job
from shardwise.runtime.world import from_first
from shardwise.spec.files import open_regular
from shardwise.spec.units import clock

Scores = dict[str, NDArray[np.float64]]
"""By split, for each pair: log p(chosen) and log p(rejected); NaN for pairs that the run does not read."""
_SAMPLE_BYTES = 2**20


def refer(job: Job, parts: Sequence[nn.Module], enter: Callable[[str], None]) -> Job:
    """``job`` with the scores of every pair that its run and its validations read. ``parts`` must hold the initial
    model. Collective. Raises DataError (DPO001) if an earlier start of the run has left no scores for these data and
    weights."""
    found = from_first(lambda: _read(job))
    if isinstance(found, Problem):
        raise DataError(found)
    scores: Scores = {name: values.numpy() for name, values in found.items()}
    begun, scored = time.perf_counter(), 0
    for name, windows, numbers in _splits(job):
        missing = [k for k in numbers if np.isnan(scores[name][windows.pairs(k)]).any()]
        if missing:
            pairs = [number for k in missing for number in windows.pairs(k)]
            scores[name][pairs] = score(job, parts, windows, missing, enter)[pairs]
            scored += len(pairs)
    if scored and job.rank == 0:
        shapes = {name: values.shape for name, values in scores.items()}
        tensorfile.write(_path(job), shapes, torch.float64, map(torch.from_numpy, scores.values()))
        print(f"reference: {scored:,} pairs scored in {clock(time.perf_counter() - begun)}", flush=True)
    return replace(job, references=scores)


def score(
    job: Job, parts: Sequence[nn.Module], windows: Packs, numbers: Sequence[int], enter: Callable[[str], None]
) -> NDArray[np.float64]:
    """log p(chosen) and log p(rejected) of the pairs in the windows ``numbers`` under the model as it is; 0 for all
    others. The ranks divide the windows among them, and all get every score."""
    pairs = windows.store.split.documents // 2
    sums = torch.zeros(pairs, 2, dtype=torch.float64, device=job.device)
    numbered = replace(windows, reference=np.arange(2.0 * pairs).reshape(-1, 2))  # so a batch says which are in it
    batches = evaluation(numbered, replace(job.share, accumulation=1), numbers=numbers)
    for _, micro, losses in scored(job, parts, batches, partial(enter, "evaluate")):
        assert micro.references is not None
        answers = answers_of(losses, micro, job.recipe.method, job.meshes.groups.get("cp"))
        sums[micro.references[:, 0].long() // 2] = answers.logps * micro.counts
    job.meshes.total(sums)
    return sums.cpu().numpy()


def _splits(job: Job) -> list[tuple[str, Packs, Sequence[int]]]:
    """Return for each split its name, its windows, and the numbers of those that the run reads."""
    count = job.max_steps * job.plan.batch.global_batch_size(job.plan.layout.dp)
    whole = count >= len(job.windows)
    train = range(len(job.windows)) if whole else np.sort(job.order.samples(0, count)).tolist()
    splits = [("train", job.windows, train), ("validation", job.held_out, job.evaluated)]
    return [(name, windows, numbers) for name, windows, numbers in splits if isinstance(windows, Packs)]


def _read(job: Job) -> dict[str, torch.Tensor] | Problem:
    """The scores on disk; all NaN if the run has not begun; a Problem if it has begun and its file is gone."""
    path = _path(job)
    sizes = {name: windows.store.split.documents // 2 for name, windows, _ in _splits(job)}
    if path.is_file():
        try:
            return read_scores(path, sizes)
        except DataError as error:
            return error.problems[0]
    if not candidates(job.directory / "checkpoints"):
        return {name: torch.full((size, 2), torch.nan, dtype=torch.float64) for name, size in sizes.items()}
    others = sorted(other.name for other in job.directory.glob("reference-*.safetensors"))
    what = f"the run has checkpoints, but {path.name}, the reference's scores, is missing"
    if others:
        what = f"the run began with other weights or data: these need {path.name}, the run has {', '.join(others)}"
    fix = "restore what the run began with, or start another run: run.name=another-name"
    return Problem("DPO001", what, str(path), fix)


def read_scores(path: Path, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The scores in a file, of so many pairs of each split. Raises DataError: DPO001 for other ones, or as
    :func:`tensorfile.entries`."""
    found, wanted = tensorfile.entries(path), {name: (torch.float64, (size, 2)) for name, size in sizes.items()}
    scores = {name: entry.read() for name, entry in found.items()}
    held = {name: (entry.dtype, entry.shape) for name, entry in found.items()}
    if held != wanted or any(bool(values.isinf().any()) for values in scores.values()):
        what, fix = f"{path.name} holds scores of other pairs, or none", "start another run: run.name=another-name"
        raise DataError(Problem("DPO001", what, str(path), fix))
    return scores


def _path(job: Job) -> Path:
    """Return the path of the scores, which is named for the data and for the weights that the run begins with: the
    names, sizes, and the first and last MiB of their files, or what they are drawn from; an adapter's that it begins
    with too."""
    source, model = weights_directory(job.recipe), job.recipe.model
    files = [] if source is None else [source]
    if source is not None and source.is_dir():
        files = sorted([*source.glob("*.safetensors"), *source.glob("config.json")])
    drawn = None if files else [job.recipe.run.seed, model.path, model.config]
    if job.recipe.lora.path is not None:
        files += [Path(job.recipe.lora.path) / name for name in (peft.CONFIG, peft.WEIGHTS)]
    digest = xxhash.xxh3_64(json.dumps([job.prepared.manifest.fingerprint, drawn], sort_keys=True).encode())
    for file in files:
        size = file.stat().st_size
        with open_regular(file) as stream:
            digest.update(f"{file.name} {size}".encode() + stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read())
    return job.directory / f"reference-{digest.hexdigest()}.safetensors"
