"""Generation: what prefill and decode hold, from a few traced steps."""
