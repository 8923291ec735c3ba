"""What the driver layer and a CUDA driver promise, as claims that run in a process of their own.

A claim is a function of a module here, registered by `@claim`. It runs on the stand-in driver and,
unchanged, on a device (tests/gpu/test_driver_contract.py).
"""
