"""What cutegen asks of the operating system: files from outside, folders of its own, child processes."""
