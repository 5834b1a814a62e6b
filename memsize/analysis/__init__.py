"""Reports, findings, fits, layouts, verifications, timelines and comparisons, made from traces."""
