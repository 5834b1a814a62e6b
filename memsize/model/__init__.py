"""A torch model as storages: its copy on `meta`, what it stores, and the inputs that it is given."""
