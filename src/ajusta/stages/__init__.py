"""Floor 5, does: files, loops and events."""
