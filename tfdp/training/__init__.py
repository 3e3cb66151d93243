"""What a private training is made of."""
