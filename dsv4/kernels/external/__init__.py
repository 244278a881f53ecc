"""FlashMLA and DeepGEMM on the same pools."""
