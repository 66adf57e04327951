"""Autocast rules: the dtype each op runs in under torch.autocast."""
