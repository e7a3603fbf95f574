"""Pages to be looked at: one HTML file each, with charts as SVG inside, readable without a network and scripts."""
