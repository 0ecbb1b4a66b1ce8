"""Preparation on other machines: what travels between the workers that make batches and the trainers that use them."""

from .batch_group import BatchGroup, pack_group, unpack_group, unpack_one

__all__ = ["BatchGroup", "pack_group", "unpack_group", "unpack_one"]
