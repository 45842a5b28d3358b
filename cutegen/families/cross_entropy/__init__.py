"""Cross-entropy of rows of logits with a label each."""
