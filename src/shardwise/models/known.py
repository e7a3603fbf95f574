"""Well-known Llama configurations, so that a plan can be made without a network. Keys as in ``config.json``."""
