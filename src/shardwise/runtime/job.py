"""The constants of a run, on one rank: everything that the loop reads, and nothing that it changes."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import shardwise
from shardwise.data import tokens
from shardwise.data.epochs import check_held_out, check_size, interval, max_steps, samples_of_epochs, settled
from shardwise.data.order import Order
from shardwise.data.pack import Packs, Windows, open_windows
from shardwise.data.portions import Portions, open_data
from shardwise.data.remote import TRUST_S
from shardwise.data.store import Prepared, TokenStore
from shardwise.data.stream import Share, share_of
from shardwise.data.whole import write_whole
from shardwise.distributed.meshes import Meshes
from shardwise.errors import DataError, Problem
from shardwise.models.config import ModelSpec
from shardwise.models.resolve import data_of, resolve
from shardwise.runtime.checkpoint.locate import RunRecord, with_facts
from shardwise.runtime.world import DeviceKind, device_of, from_first, process
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.record import from_json

SAVES_A_RUN = 10
TRAINED_EACH = 5
"""A sample is validated on for so many that are trained on: forward alone, that is a fifteenth of their computation."""
"""How many checkpoints a run makes when ``checkpoint.save_steps`` is not given."""


@dataclass(frozen=True)
class Job:
    """A run as one rank sees it. ``run_id`` binds checkpoints to the run. ``references``: of pairs, the scores of the
    initial model, by split (runtime/reference.py). ``portions``: of streamed data, of which the first is
    ``prepared``. ``meshes`` have groups once the ranks have met."""

    recipe: Recipe
    plan: Plan
    spec: ModelSpec
    prepared: Prepared
    device: torch.device
    max_steps: int
    meshes: Meshes
    run_id: str = ""
    references: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    portions: Portions | None = None

    @property
    def directory(self) -> Path:
        return run_directory(self.recipe)

    @property
    def with_scratch(self) -> Recipe:
        """The recipe with the directory of what is kept on NVMe, which is the run's own unless it says another."""
        asked = self.recipe.offload
        placed = asked.model_copy(update={"directory": asked.directory or str(self.directory)})
        return self.recipe.model_copy(update={"offload": placed})

    @property
    def rank(self) -> int:
        return self.meshes.rank

    @cached_property
    def windows(self) -> Windows | Packs:
        """The training text, cut into samples."""
        return self._open(self.prepared.train, "train")

    @property
    def held_out(self) -> Windows | Packs | None:
        """The validation text, cut into samples; None if there is none."""
        store = self.prepared.validation
        return None if store is None else self._open(store, "validation")

    def _open(self, store: TokenStore, split: str) -> Windows | Packs:
        opened = open_windows(store, self.plan.batch.seq_len, self.recipe.data.mask_documents)
        return replace(opened, reference=self.references.get(split)) if isinstance(opened, Packs) else opened

    @property
    def evaluated(self) -> range:
        """The windows of the validation text that are read: without a limit, at most one for every ``TRAINED_EACH``
        that the run trains on, and no fewer than a step's."""
        limit = self.recipe.evaluate.max_batches
        windows = self.held_out
        batch = self.plan.batch
        step = batch.global_batch_size(self.plan.layout.dp)
        rows = max(step, step * self.max_steps // TRAINED_EACH)
        if limit is not None:
            rows = limit * batch.micro_batch_size * self.plan.layout.dp
        return range(0) if windows is None else range(min(rows, len(windows)))

    @property
    def step_room(self) -> int:
        """The tokens of a step, padding among them."""
        return self.plan.batch.global_batch_size(self.plan.layout.dp) * self.plan.batch.seq_len

    @property
    def end(self) -> int | None:
        """Return how many samples the run reads, where its epochs set that."""
        return samples_of_epochs(self.windows, self.recipe.train.num_epochs)

    @property
    def order(self) -> Order | Portions:
        return self.portions or Order(len(self.windows), self.recipe.run.seed)

    @property
    def share(self) -> Share:
        """The part of every batch that this rank reads."""
        return share_of(self.meshes.layout, self.plan.batch, self.meshes.rank, ahead=self.spec.predictors > 0)

    @property
    def save_steps(self) -> int:
        """Steps between two checkpoints."""
        steps, per_epoch = self.recipe.checkpoint.save_steps, self.recipe.checkpoint.saves_per_epoch
        return self._interval(steps, per_epoch) or max(1, -(-self.max_steps // SAVES_A_RUN))

    @property
    def eval_steps(self) -> int | None:
        """Steps between two validations; None: only at the end."""
        return self._interval(self.recipe.evaluate.eval_steps, self.recipe.evaluate.evals_per_epoch)

    def _interval(self, steps: int | None, per_epoch: int | None) -> int | None:
        return interval(steps, per_epoch, self.windows, self.plan.batch.global_batch_size(self.plan.layout.dp))

    @cached_property
    def tokenizer(self) -> tokens.Tokenizer:
        return tokens.open_directory(self.prepared.tokenizer_directory)


def run_directory(recipe: Recipe) -> Path:
    """``runs/<name>``."""
    return Path(recipe.run.out) / recipe.run.name


def count_windows(recipe: Recipe) -> int:
    """The windows of the training text, which is prepared if need be."""
    prepared, _ = open_data(recipe, data_of(recipe), run_directory(recipe) / "stream", process().rank == 0, TRUST_S)
    return len(open_windows(prepared.train, recipe.train.seq_len, recipe.data.mask_documents))


def open_job(recipe: Recipe, plan: Plan, spec: ModelSpec | None = None) -> Job:
    """Find (or make) the prepared data, and read the model's dimensions unless ``spec`` has them. No process group is
    needed yet."""
    data, first = data_of(recipe), process().rank == 0
    prepared, portions = open_data(recipe, data, run_directory(recipe) / "stream", first, TRUST_S)
    spec = spec or resolve(recipe)
    tokens.check_vocabulary(prepared.manifest.vocab_size, spec.vocab_size)
    meshes = Meshes(plan.layout, process().rank)
    job = Job(recipe, plan, spec, prepared, device_of(device_kind(recipe)), 0, meshes, portions=portions)
    batch = plan.batch.global_batch_size(plan.layout.dp)
    check_size(job.windows, batch, recipe.data)
    check_held_out(recipe, prepared)
    recipe = settled(recipe, job.windows)
    return replace(job, recipe=recipe, max_steps=max_steps(recipe, job.windows, batch))


def device_kind(recipe: Recipe) -> DeviceKind:
    """Return the kind of device that this run computes on: as the recipe says, else GPUs if there are any."""
    if recipe.run.device != "auto":
        return recipe.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def agree_on_identity(job: Job, meshes: Meshes) -> Job:
    """Agree on the run's identity: as an earlier start of the run left it in ``run.json``, else decided now by rank 0.
    Raises DataError DATA013 when the data are not those of the run. From here on torch computes as the plan says."""
    run = from_first(lambda: read_run(job.directory))
    data = job.prepared.manifest.fingerprint
    if run and run["data"] != data:
        prints = f"(fingerprint {run['data'][:8]}, now {data[:8]})"
        what = f"run {job.recipe.run.name} was started with other data {prints}"
        fix = "restore the data, or start another run: run.name=another-name"
        raise DataError(Problem("DATA013", what, str(job.directory / "run.json"), fix))
    run_id = run["run_id"] if run else from_first(lambda: uuid.uuid4().hex[:12])
    job = replace(job, run_id=run_id, meshes=meshes)
    torch.set_float32_matmul_precision(job.plan.precision.matmul)
    if job.plan.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(job.plan.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of a module
    if job.rank == 0 and not (job.directory / "run.json").exists():
        write_run(job)
    return job


def read_run(directory: Path) -> dict[str, Any] | None:
    """``run.json`` of an earlier start in ``directory``, which is created if needed. If the file is damaged or lost, it
    is restored from a checkpoint. None: no run was started here."""
    directory.mkdir(parents=True, exist_ok=True)
    path, state = directory / "run.json", "is missing"
    if there := path.exists():
        try:
            return {**vars(from_json(RunRecord, read_regular(path, NOTE_BYTES)))}
        except (OSError, ValueError) as error:
            state = f"cannot be read ({error}), and was renamed to run.json.damaged"
        path.rename(path.with_name("run.json.damaged"))
    found = next((each for each in with_facts(directory / "checkpoints") if "data" in each[2]), None)
    if there or found:
        source = f"it is restored from {found[0].name}" if found else "no checkpoint needs it, so the run starts over"
        print(f"warning[RUN006]: {path} {state}; {source}", flush=True)
    return found and {"run_id": found[1].run_id, "data": found[2]["data"]}


def identity(job: Job) -> dict[str, Any]:
    """Return the facts that must not change when a run is resumed; they are in ``run.json`` and in every checkpoint."""
    return {"data": job.prepared.manifest.fingerprint}


def write_run(job: Job) -> None:
    """Write ``run.json`` atomically."""
    record = {
        "format": 1,
        "run_id": job.run_id,
        "name": job.recipe.run.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "shardwise": shardwise.__version__,
        "torch": str(torch.__version__),
        "seed": job.recipe.run.seed,
        "model": job.spec.name,
        "tokenizer": job.prepared.manifest.tokenizer_hash,
        **identity(job),
    }
    write_whole(job.directory / "run.json", json.dumps(record, indent=1) + "\n")
