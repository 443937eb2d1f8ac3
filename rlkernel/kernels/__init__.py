"""GPU kernels, one noun a file. Importing any of them needs neither a GPU nor a CUDA build."""
