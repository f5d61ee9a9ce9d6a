"""Floor 5, decides: the plan of a run, by tracing the engine's own phases on `meta`."""
