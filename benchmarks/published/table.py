def update(root): return []
