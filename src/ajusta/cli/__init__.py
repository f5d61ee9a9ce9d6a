"""Floor 7, hands and mouth: the command line. Nothing heavy is imported before a command is known to need it."""
