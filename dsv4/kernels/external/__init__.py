"""External kernels as backends: FlashMLA and DeepGEMM on our pools."""
