"""The table of what a job can be written for. One more is a module beside this one and a row here."""

from __future__ import annotations

from shardwise.launch.jobs import kubernetes, ray, skypilot, slurm, ssh

KINDS = {kind.name: kind for kind in (slurm.KIND, *kubernetes.KINDS, skypilot.KIND, ray.KIND, ssh.KIND)}
"""All kinds of jobs by name."""
