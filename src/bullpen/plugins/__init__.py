"""What can be exchanged: transports, channels, sources. Each knows a port, none knows a feature."""
