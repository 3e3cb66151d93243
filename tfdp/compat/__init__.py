"""Names that code written for other libraries knows."""
