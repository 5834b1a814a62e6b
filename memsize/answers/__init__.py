"""What the commands answer with: frozen values that print, tabulate, become JSON and say why. Each is in a file of its
command's name; those of `memsize checkpoint` and `memsize verify` live with what they are made of.
"""
