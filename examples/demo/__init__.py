"""`bullpen demo`: real worker processes, one of which is killed, and a sum that must add up; then the other systems.

The wheel carries it as `bullpen._demo`; everything in it is what a program of yours could write.
"""
