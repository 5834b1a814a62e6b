"""A torch model as storages: its copy on `meta`, what it stores, what it is given."""
