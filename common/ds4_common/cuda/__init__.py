"""The CUDA driver, as far as the owner, the loader and the worker need it.

`driver` is the only module that imports the bindings; the others are thin classes upon it. Nothing
here is imported at start-up by a program that runs without a GPU.
"""
