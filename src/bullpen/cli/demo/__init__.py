"""`bullpen demo`: real worker processes, one of which is killed, and a sum that must add up."""
