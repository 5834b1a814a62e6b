"""The workloads behind the published figures, rebuilt from the scripts that their sources name."""
