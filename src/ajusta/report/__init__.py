"""Floor 5, shows: what a person sees of a run while it goes on and when it is over. Decides and computes nothing."""
