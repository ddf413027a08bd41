"""Bridges to inference engines. Nothing here is imported by `import tiercache`; each needs its own engine."""
