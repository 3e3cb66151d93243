"""What was run: counted where it runs, known to all that comes from it."""
