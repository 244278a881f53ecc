"""Other projects' kernels on our pools, where they can be imported: FlashMLA and DeepGEMM."""
