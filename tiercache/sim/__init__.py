"""Traces, and their replay through the real cache or through its planner alone."""
