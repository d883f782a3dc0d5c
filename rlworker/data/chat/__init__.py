"""Chats: their messages, the templates that write them, and the model's turns."""
