"""Floor 2, bytes: where tensors live, what they weigh, and what the process holds."""
