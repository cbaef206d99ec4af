"""`bullpen top`: all queues on one screen, again and again."""
