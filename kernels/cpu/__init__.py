"""Native CPU kernels: plain C++ sources, built by setup.py into one shared library, and its ctypes loader."""
