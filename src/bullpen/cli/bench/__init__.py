"""`bullpen bench`: how fast jobs go in and out of a server of yours."""
