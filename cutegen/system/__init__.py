"""Files, folders and processes: untrusted files read with limits, private folders, isolated children."""
