"""Attention and weight-decompression kernels: pure functions on arrays that know nothing of jaxinfer.

One folder an op: reference.py is the XLA version, the oracle for every kernel and the path on CPU; api.py chooses.
"""
