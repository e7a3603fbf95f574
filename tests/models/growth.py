"""How much memory of its own a process takes to read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import shardwise

CODE = """
from pathlib import Path
from shardwise.models import tensorfile
from shardwise.models.hf_names import Location
from shardwise.models.stored import StoredParameter, StoredRows
def anonymous():
    text = Path('/proc/self/smaps_rollup').read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith('Anonymous:'))
entry = tensorfile.entries(Path({file!r}))['x']
{first}
before = anonymous()
part = {read}
print(1024 * (anonymous() - before), float(part.sum()))
"""


def grown(file: Path, read: str, first: str = "") -> tuple[int, float]:
    """By how many bytes the anonymous memory of a fresh process grows when it evaluates ``read``, where ``entry`` is
    the tensor x of a safetensors file; and the sum of what it has read. ``first``: what it runs before."""
    code = CODE.format(file=str(file), read=read, first=first)
    environment = {"PYTHONPATH": str(Path(shardwise.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    grown_bytes, total = told.stdout.split()
    return int(grown_bytes), float(total)
