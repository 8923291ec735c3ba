"""`ds4-profile`: workers under a profiler beside an owner that stays. Guide: docs/profiling.md."""
