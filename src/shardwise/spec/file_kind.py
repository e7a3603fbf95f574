"""Recognises files that are not safetensors, by their suffix or first bytes, without parsing them."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import PolicyError, Problem
from shardwise.spec.files import open_regular

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")
_MAGIC = {
    b"version https://git-lfs": ("a Git LFS pointer", "fetch the real file: git lfs pull"),
    b"<": ("an HTML or XML page", "download the file itself, not its page"),
    b"\x1f\x8b": ("a gzip archive", "unpack it first: gunzip"),
    b"PK\x03\x04": ("a zip archive, as torch.save writes", "convert it to safetensors where it came from"),
    b"\x80": ("a pickle, which can run code", "convert it to safetensors where it came from"),
}


def recognise(path: Path) -> Problem | None:
    """CKPT006 for a file that is something else; None for one that begins as safetensors do, or is unknown."""
    with open_regular(path) as file:
        head = file.read(64)
    if head[8:9] == b"{":  # the eight bytes before a header are its length, and may look like anything
        return None
    for magic, (kind, fix) in _MAGIC.items():
        if head.lstrip().startswith(magic) or head[8:].startswith(magic):
            return Problem("CKPT006", f"{path.name} is {kind} ({path.stat().st_size:,} bytes)", str(path), fix)
    return None


def pickle_refused(path: Path) -> PolicyError:
    """SEC004."""
    load = f"torch.load('{path.name}', weights_only=True)"
    fix = f"if you trust it: safetensors.torch.save_file({load}, 'model.safetensors')"
    return PolicyError(Problem("SEC004", f"{path.name} is a pickle and can run code", str(path), fix))
