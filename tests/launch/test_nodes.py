"""Several nodes: lines that torchrun itself understands."""

from __future__ import annotations

import shlex

from torch.distributed.run import get_args_parser

from shardwise.launch.nodes import lines


def test_each_node_has_its_line() -> None:
    found = lines(2, 8, ["runs/a b/recipe.yaml", "--plan", "runs/a b/plan.yaml"], run_id="a")
    assert len(found) == 2
    for node, line in enumerate(found):
        variable, torchrun, *words = shlex.split(line.replace("$FIRST_NODE", "host-a"))
        assert (variable, torchrun) == ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun")
        parsed = get_args_parser().parse_args(words)
        assert (parsed.nnodes, parsed.nproc_per_node, parsed.node_rank) == ("2", "8", node)
        assert (parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.rdzv_id) == ("c10d", "host-a:29500", "a")
        assert (parsed.module, parsed.training_script) == (True, "shardwise")
        assert parsed.training_script_args == ["train", "runs/a b/recipe.yaml", "--plan", "runs/a b/plan.yaml"]
