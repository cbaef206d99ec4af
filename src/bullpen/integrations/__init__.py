"""bullpen inside of other programs' frameworks and services, a module each; every one needs what it is named after."""
