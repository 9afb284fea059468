"""Stand-ins for vendor packages on CPU tensors: each obeys its library's own conventions, and raises where the real one
would refuse or read out of bounds. They cite the conventions that they reproduce by the names of their rows.
"""
