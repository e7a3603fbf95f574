"""The records of a run: what it writes down while it runs (log, trackers; pending: figures that come a step late), and
what is measured of it (measure, profile)."""
