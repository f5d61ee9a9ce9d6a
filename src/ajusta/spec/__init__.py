"""Floor 1, nouns: frozen records that the other floors hand to one another. No torch here."""
