"""Do the values fit every stage? Model sizes, batches, orders, and the arguments that ranks and sites must share."""
