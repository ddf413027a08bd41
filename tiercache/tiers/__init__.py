"""Slot tiers: host memory, device memory, files. All behind the one interface in `base`."""
