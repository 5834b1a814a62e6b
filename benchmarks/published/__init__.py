"""Predictions beside memory figures that others measured on real GPUs and published.

`sources` says where each figure comes from and what is known of its setting, `measurements.csv` has the figures,
`recipes` rebuild the workloads, `environments` installs the exact releases they were measured with, `table` sums up.

    python -m benchmarks.published              predict every row and write what the tables need
    python -m benchmarks.published --only 'bert-base/*'
    python -m benchmarks.published --tables     write the tables again from the stored predictions
"""
