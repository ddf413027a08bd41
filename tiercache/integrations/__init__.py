"""Engines that tiercache plugs into. Nothing here is imported by `import tiercache`."""
