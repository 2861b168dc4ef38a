"""Weights between Hugging Face's names and Megatron's: one table a family, read in both directions."""
