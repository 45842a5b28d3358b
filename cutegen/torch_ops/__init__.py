"""The operators that PyTorch programs call, eager and under torch.compile."""
