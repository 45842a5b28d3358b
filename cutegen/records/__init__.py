"""What is kept: every trial (SQLite) and the winner of each problem (JSON)."""
