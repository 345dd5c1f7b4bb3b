"""C++ kernels for x86 and Arm CPUs, without headers of torch, so that they compile in seconds, and their loading.

One source serves every level of instructions: `#ifdef __AVX512BF16__` and the like tell them apart.
"""
