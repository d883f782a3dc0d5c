"""Dense masks: one that kernels take, and the table of pairs with which all are compared."""
