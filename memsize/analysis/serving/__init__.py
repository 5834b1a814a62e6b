"""Serving: what a paged server makes of a card, by vLLM's rules."""
