"""Parts of tools/bringup.py: what is tried, how it is judged, and how a fault is pinned down."""
