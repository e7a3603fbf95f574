"""The things that can go wrong with a run: hangs, requests to stop and bad steps (guard, heartbeat, flight, signals),
and how it ended (outcome)."""
