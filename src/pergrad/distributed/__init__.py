"""Runs on many processes by torch.distributed: sums over ranks, wrappers, sharded parameters."""
