"""How the gradients of layers factorise."""
