"""The CPU platform: a rule lowered to calls of scaled dot-product attention."""
