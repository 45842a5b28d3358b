"""The commands: parse arguments, call, print. No logic of their own."""
