"""Pure functions of tensors that return unreduced loss terms, and the name -> function tables."""
