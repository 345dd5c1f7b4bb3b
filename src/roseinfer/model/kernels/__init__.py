"""C++ kernels for x86 CPUs, their compilation and their loading.

Each file has a plain C interface of pointers and integers and includes no header of torch, so it compiles in seconds.
One source serves every level of instructions: `#ifdef __AVX512BF16__` and the like tell them apart.
"""
