"""The processes that run environments, and the driver's pool of them."""
