"""From a problem to a loaded kernel: dispatch, the kernel cache, workspaces."""
