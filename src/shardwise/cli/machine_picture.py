"""The machines of a plan as a picture: devices, links and memory, and what a step sends over each."""

from __future__ import annotations

from shardwise.cli.render import sent_by_link
from shardwise.pages.charts import WIDE, Picture, drawing, element, written
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.units import show_bytes, show_payload

SIDE, GAP, MOST_DRAWN = 46, 8, 8
"""A device in pixels, what lies between two, and how many are drawn."""


def machines(cluster: Cluster, plan: Plan) -> Picture:
    """A node with its devices, what they are linked by, and the other nodes."""
    sent, estimate, each = sent_by_link(plan), plan.estimate, cluster.devices_per_node
    drawn = min(each, MOST_DRAWN)
    link = (
        f"{show_payload(cluster.link_bytes_per_s)}/s a device"
        if each > 1 and cluster.link_bytes_per_s
        else "one device"
    )
    lines = [f"each has {show_bytes(cluster.device.memory_bytes)}; the fullest takes {show_bytes(estimate.peak_bytes)}"]
    lines.append(
        f"links in the node: {link}" + f"; a rank sends {show_payload(sent['node'])} a step" * bool(sent["node"])
    )
    held = f", of which {show_bytes(estimate.host_bytes)} are taken" * bool(estimate.host_bytes)
    lines += [f"host memory: {show_bytes(cluster.host_memory_bytes)}{held}"] * bool(cluster.host_memory_bytes)
    if estimate.disk_bytes:
        lines.append(f"disks: {show_bytes(estimate.disk_bytes)}, {show_payload(estimate.written_bytes)} written a step")
    node = 560
    parts = [
        _box(10, 10, node, 84 + 24 * len(lines)),
        written(22, 30, f"a node: {each} x {cluster.device.name}", class_="name"),
    ]
    for place in range(drawn):
        left = 22 + place * (SIDE + GAP)
        more = place == drawn - 1 and each > drawn
        parts += [_box(left, 42, SIDE, 30), written(left + SIDE / 2, 62, "..." if more else str(place), "middle")]
    parts += [written(22, 98 + 24 * number, line) for number, line in enumerate(lines)]
    if cluster.nodes > 1:
        left, middle = node + 10, 52 + 12 * len(lines)
        parts.append(element("path", class_="axis", d=f"M{left} {middle}H{left + 190}"))
        parts.append(written(left + 95, middle - 10, f"{show_payload(cluster.network_bytes_per_s)}/s a node", "middle"))
        parts.append(written(left + 95, middle + 20, f"a rank sends {show_payload(sent['network'])}", "middle"))
        parts.append(written(left + 95, middle + 38, "a step", "middle"))
        others = f"{cluster.nodes - 1:,} more {'node' if cluster.nodes == 2 else 'nodes'}"
        parts += [
            _box(left + 190, middle - 38, 140, 76),
            written(left + 260, middle + 4, others, "middle", class_="name"),
        ]
    title = "The machines, and what a rank sends in a step"
    said = f"{title}: {cluster.nodes:,} x {each} x {cluster.device.name}"
    return Picture(title, drawing(said, WIDE, 104 + 24 * len(lines), "".join(parts)), wide=True)


def _box(x: float, y: float, width: float, height: float) -> str:
    return element("rect", class_="box", x=float(x), y=float(y), width=float(width), height=float(height), rx=4)
