"""How what a user reads first is worded: errors of the command line, what a plan assumes, how long a run takes.

Everything else compares codes, fields and values (``tests.said``). Who words one of these anew brings the new text:

    .venv/bin/python -m tests.test_texts > tests/texts.txt
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwise.cli.app import main
from shardwise.cli.length import length_lines
from shardwise.planner.length import Length
from shardwise.spec.cluster import parse_cluster

GOLDEN = Path(__file__).with_name("texts.txt")
COMMANDS = """\
train --sequence-lenn 4
train --optm.lr=3
train quickstrat
train nowhere.yaml
train --run ../x
train --bogus
train --resum
train --seq-len
train a.yaml b.yaml
train --cluster 2x8xH100
data prepare cluster=2xCPU
train --cluster 8xH101
plan train.global_batch_size=10 train.micro_batch_size=4
train model.config={} model.init=pretrained
train trian.seq_len=3 optim.beta2=1
train train.max_steps=1.5
train optim.schedule=Cosin
plan --explain everything
train --resume gone
plan --cluster 8xH100 --price A100=2
plan --cluster 8xH100 --price H100
plan --cluster 8xH100 --price H100=1 --price H100=nan
plan --cluster 8xH100 --tokens many
train method=dpo data.train_on=last
train method=sft method.beta=0.2
"""
DAY = Length("--tokens", 2385, 10_003_415_040, 11_520.0, 10_200.0, 13_200.0, 25.6, 2.5, 64.0)
PAGES: dict[str, Callable[[], object]] = {
    "length, of tokens": lambda: length_lines(DAY)[0],
    "length, of epochs": lambda: length_lines(replace(DAY, set_by="train.num_epochs", gpu_hours=0.02, dollars=0.05))[0],
    "length, not known": lambda: length_lines(Length("unknown", 239, 10**9))[0],
    "length, by default": lambda: length_lines(Length("the default", 1000, 2_000_000))[0],
    **{
        f"assumed of {name}": lambda name=name: "\n".join(parse_cluster(name).assumptions)  # type: ignore[misc]
        for name in ("2x8xRTX-PRO-6000+200Gb/node", "2048xH100", "2x8xL40S", "8xL40S")
    },
}


def texts() -> Iterator[str]:
    """Each command with its exit code and what it writes, then each page."""
    for line in COMMANDS.splitlines():
        said = io.StringIO()
        with TemporaryDirectory() as empty, chdir(empty), redirect_stdout(said), redirect_stderr(said):
            code = main(shlex.split(line))
            assert os.listdir() == []
        yield f"$ shardwise {line}\n[{code}] {said.getvalue()}"
    for name, page in PAGES.items():
        yield f"# {name}\n{page()}\n"


def test_what_is_read_first_is_worded_as_it_was() -> None:
    assert "\n".join(texts()) == GOLDEN.read_text("utf-8")


if __name__ == "__main__":
    print("\n".join(texts()), end="")
