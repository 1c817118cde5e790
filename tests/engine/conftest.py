"""The fixtures of `tiny_engines`, for the tests in this folder."""

from tiny_engines import bench, reference, tiny_engine, tiny_executor

__all__ = ["bench", "reference", "tiny_engine", "tiny_executor"]
