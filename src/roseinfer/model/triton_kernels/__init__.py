"""Triton kernels for GPUs: paged attention, norms, rotations and gates, and sampling."""
