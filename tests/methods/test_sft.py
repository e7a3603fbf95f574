"""Supervised fine-tuning: what is packed trains as what is not, in float64."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from shardwise.data import tokens
from shardwise.data.micro_batch import MicroBatch, collate
from shardwise.data.pack import Packs, Windows, open_windows
from shardwise.data.prepare import prepare
from shardwise.methods import pretrain
from shardwise.models.config import from_hf
from shardwise.models.decoder import Decoder
from shardwise.runtime import passes
from shardwise.spec.recipe import Data, TokenizerSection

DIMENSIONS = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 300,
}


def windows(directory: Path, packing: bool) -> Windows | Packs:
    """Conversations of unequal length, packed or each in a window of its own."""
    talks = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "word " * (1 + i * 5 % 11)}]
        for i in range(14)
    ]
    (directory / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    if not (directory / "tokenizer").is_dir():
        (directory / "tokenizer").mkdir()
        tokens.train_tokenizer(["say word user assistant " * 50], 300, directory / "tokenizer")
    data = Data(
        path=str(directory / "talks.jsonl"),
        cache=str(directory / "cache"),
        tokenizer=TokenizerSection(path=str(directory / "tokenizer")),
        validation_share=0.0,
        chat_template="zephyr",
        packing=packing,
        num_proc=1,
    )
    return open_windows(prepare(data, sample_tokens=96).train, 96, True)


def train(batches: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    model = Decoder(from_hf(DIMENSIONS, "tiny")).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    supervised = sum(batch.supervised_tokens() for batch in batches)
    total = 0.0
    for batch in batches:
        finish = partial(pretrain.finish, denominator=float(supervised), chunk_tokens=64)
        loss = passes.forward([model], batch, finish).value
        loss.backward()
        total += loss.item()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return total, gradients, supervised


def test_packed_loss_and_gradients_are_those_of_samples_alone(tmp_path: Path) -> None:
    """Each sample by itself, without any padding behind it, against windows of several. 1e-12: sums in another order
    in float64."""
    packed, alone = windows(tmp_path, packing=True), windows(tmp_path, packing=False)
    assert len(packed) < len(alone) == 14
    loss, gradients, count = train([collate([packed[k] for k in range(len(packed))])])
    single = []
    for k in range(len(alone)):
        sample = alone[k]
        length = sample.segments[0]
        ids, labels = (torch.from_numpy(array[:length])[None] for array in (sample.ids, sample.labels))
        single.append(MicroBatch(ids, labels, torch.arange(length)[None], None, length))
    expected, theirs, same = train(single)
    assert count == same and 0 < count < sum(int(batch.ids.numel()) for batch in single)
    assert abs(loss - expected) <= 1e-12 * abs(expected)
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        assert float((gradient - theirs[name]).norm()) <= 1e-12 * float(theirs[name].norm()), name
