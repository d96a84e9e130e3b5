"""Second-order links: Newton's method and its relatives, with the Hessian or products with it."""
