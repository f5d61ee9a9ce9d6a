"""Floor 4: one model, and each phase of its life as a function over a Place."""
