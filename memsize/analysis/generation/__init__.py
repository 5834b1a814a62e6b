"""Generation: what prefill and decode hold, from a few traced steps, and what a server makes of it."""
