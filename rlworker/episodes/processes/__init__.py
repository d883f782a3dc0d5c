"""The processes that run plays: what goes on in each, and the driver's pool of them."""
