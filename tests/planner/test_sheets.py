"""The units that ship are those the code makes, and a sheet survives being written down."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path

import pytest

from shardwise import techniques
from shardwise.models.config import ModelSpec, parameter_count
from shardwise.models.families import FAMILIES, FULL, SLIDING
from shardwise.planner import sheets, ship
from shardwise.planner.features import templates
from shardwise.planner.passes import seen
from shardwise.planner.schedule import folded
from shardwise.planner.trace import trace
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Shard
from shardwise.spec.sheet import Sheet
from tests.models.families import config_of
from tests.models.hf_models import spec_of as hf_spec_of

SPEC = ModelSpec("small", 500, 32, 80, 3, 4, 2, 8)


@pytest.mark.big
def test_shipped_units_are_what_the_code_makes() -> None:
    assert sheets.shipped() == ship.make(ship.reachable())


def test_some_shipped_units_are_what_the_code_makes() -> None:
    made = ship.make(dict.fromkeys([*ship.reachable()][::16]))
    assert len(made) >= 10 and made.items() <= sheets.shipped().items()


def test_the_shipped_file_is_small() -> None:
    """Before sizes were symbols, each well-known model had a sheet of its own: 85,854 bytes."""
    assert len(files("shardwise.planner").joinpath(sheets.SHIPPED).read_bytes()) < 85_854


ODD = replace(SPEC, norm_placement="both", qk_norm="projection", residual_multiplier=3.0)
"""Features that no family has together."""
KINDS = {"ships": (lambda: SPEC, 0), "odd": (lambda: ODD, 1), "transformers'": (lambda: hf_spec_of("gpt_neox"), 1)}
"""A model by whether its sheet ships, and how many files it takes in the cache."""


@pytest.mark.parametrize("variant", ship.VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_ship_is_cached(kind: str, variant: str, tmp_path: Path) -> None:
    spec_of, kept = KINDS[kind]
    made = sheets.sheet_of(spec_of(), variant, tmp_path)
    assert asdict(made) == asdict(trace(spec_of(), variant))
    assert len(list(tmp_path.iterdir())) == kept
    assert asdict(sheets.sheet_of(spec_of(), variant, tmp_path)) == asdict(made)


@pytest.mark.parametrize("kind", [kind for kind, (_, kept) in KINDS.items() if kept])
def test_a_spoilt_cache_is_made_again(kind: str, tmp_path: Path) -> None:
    spec = KINDS[kind][0]()
    made = sheets.sheet_of(spec, "wide", tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{not json")
    assert asdict(sheets.sheet_of(spec, "wide", tmp_path)) == asdict(made)


def test_depth_and_name_share_a_sheet() -> None:
    spec = hf_spec_of("gpt_neox")
    assert sheets.key(spec, "wide") == sheets.key(replace(spec, name="other", num_hidden_layers=9), "wide")
    assert sheets.key(spec, "wide") != sheets.key(replace(spec, hidden_size=32), "wide")
    assert sheets.key(spec, "wide") != sheets.key(spec, "narrow")


def test_units_of_other_code_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheets, "code_digest", lambda: "another")
    assert sheets.shipped.__wrapped__() == {}


PLANS = """
import json, sys
from pathlib import Path
from shardwise.cli.app import main
from shardwise.models.config import from_hf, parameter_count
from shardwise.planner.sheets import sheet_of

for path in sorted(Path("models").iterdir()):
    code = main(["plan", f"model.path={path}", *sys.argv[1:]])
    assert code == 0, (path.name, code)
    assert "torch" not in sys.modules, path.name
    spec = from_hf(json.loads((path / "config.json").read_text()), path.name)
    sheet = sheet_of(spec, "wide")
    total = sum(times * sum(weight.numel(1, 1) for weight in unit.weights) for unit, times in sheet.repeated())
    assert total == parameter_count(spec), (path.name, total)
    assert "torch" not in sys.modules, path.name
"""
"""Of every model under ``models``."""


@pytest.mark.parametrize("more", [[], ["lora=8", "lora.dropout=0.1", "lora.dora=true"]], ids=["whole", "adapters"])
def test_any_model_of_a_family_has_a_sheet_without_torch(more: list[str], tmp_path: Path) -> None:
    """Of every family one whose config.json nobody has seen before, with the family's defaults, and one with every
    feature at work; its weights are as many as the model's."""
    unknown = {"vocab_size": 1234, "hidden_size": 96, "intermediate_size": 200, "pad_token_id": None}
    unknown |= {"num_hidden_layers": 7, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 22}
    for family in FAMILIES:
        plain, featured = unknown | {"model_type": family}, config_of(family) | {"vocab_size": 1234}
        for name, config in {family: plain, f"{family}-featured": featured}.items():
            (tmp_path / "models" / name).mkdir(parents=True)
            (tmp_path / "models" / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "a.txt").write_text("one two three\n" * 4000)
    words = ["data.path=a.txt", "data.tokenizer.path=bytes", "--cluster", "8xH100", *more]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PLANS, *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert not (tmp_path / ".cache" / "shardwise" / "sheets").exists()


WINDOWED = replace(
    SPEC, num_hidden_layers=4, sliding_window=16, layer_types=(SLIDING, SLIDING, FULL, SLIDING), final_soft_cap=30.0
)
MIXED = replace(WINDOWED, nope_layers=(1,))


@pytest.mark.parametrize(("spec", "kinds", "sorts"), [(SPEC, 1, 1), (WINDOWED, 2, 1), (MIXED, 3, 2)])
def test_blocks_of_several_kinds(spec: ModelSpec, kinds: int, sorts: int, tmp_path: Path) -> None:
    """What is not rotated allocates less; a window changes only what attention computes."""
    made = sheets.sheet_of(spec, "narrow", tmp_path)
    again = sheets.sheet_of(spec, "narrow", tmp_path)
    assert asdict(made) == asdict(trace(spec, "narrow")) == asdict(again)
    assert len(made.blocks) == kinds and len({block.forward for block in made.blocks}) == sorts
    assert made.capped == (spec.final_soft_cap is not None)
    assert [made.blocks[kind].window for kind in made.order] == [
        spec.sliding_window if spec.layer_types and spec.layer_types[layer] == SLIDING else None
        for layer in range(spec.num_hidden_layers)
    ]


def test_windows_and_numbers_share_units_but_sorts_of_layers_do_not() -> None:
    assert templates(SPEC) == templates(WINDOWED) != templates(MIXED)
    assert templates(SPEC) == templates(replace(SPEC, hidden_size=96, head_dim=6, rope_theta=1e6))
    assert templates(SPEC) != templates(replace(SPEC, norm_placement="both"))


def test_a_window_saves_arithmetic_beyond_it() -> None:
    """Pairs of query and key are counted one by one."""
    assert seen(9, None) == seen(9, 9) == seen(9, 20) == 81
    for s, window in ((64, 16), (100, 7)):
        pairs = sum(min(place + 1, window) for place in range(s))
        assert abs(seen(s, window) / 2 - pairs) <= s
    plan = Plan(Layout(), Batch(1, 1, 64), Shard(), Precision())
    sheets_of = (trace(spec, "wide") for spec in (replace(WINDOWED, sliding_window=None), WINDOWED))
    whole, cut = (folded(techniques.cost(sheet, plan), plan).flops for sheet in sheets_of)
    attention = 4 * flops(trace(SPEC, "wide"), "b*s*s")
    assert whole - cut == 3 * attention // 4 * (64 * 64 - seen(64, 16))


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_of_a_sheet_are_the_models(tied: bool) -> None:
    spec = replace(SPEC, tie_word_embeddings=tied)
    sheet = trace(spec, "wide")
    total = sum(times * sum(weight.numel(1, 1) for weight in unit.weights) for unit, times in sheet.repeated())
    assert total == parameter_count(spec)


def test_products_cost_six_operations_a_weight_and_token() -> None:
    """Two forward, four backward: the rule of thumb, found in the trace and not put there."""
    block = trace(SPEC, "wide").blocks[0]
    weights = sum(weight.numel(1, 1) for weight in block.weights if len(weight.shape) == 2)
    assert flops(trace(SPEC, "wide"), "b*s") == 6 * weights


def flops(sheet: Sheet, per: str) -> int:
    block = sheet.blocks[0]
    return sum(op.flops for ops in (block.forward, block.backward) for op in ops if op.per == per)
