"""What follows from traces: findings, fits, layouts, verifications, timelines, comparisons."""
