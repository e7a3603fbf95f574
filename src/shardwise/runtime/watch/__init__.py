"""What watches a run and writes down what it sees: hangs, stops and bad steps (guard, heartbeat, flight, signals),
figures (metrics, trackers, pending), measurements (measure, profile, garbage), and how it ended (outcome)."""
