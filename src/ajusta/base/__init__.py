"""Floor 0, words: errors, units, events. Standard library only."""
