"""The faces of other libraries over bullpen: a program that was written for one of them changes its import."""
