"""C++ beside the tensors: kernels for x86 CPUs, their compilation and their loading. Knows nothing about models.

Each file has a plain C interface of pointers and integers and includes no header of torch, so it compiles in seconds.
One source serves every level: what a level has is asked with `#ifdef __AVX512BF16__` and the like.
"""
