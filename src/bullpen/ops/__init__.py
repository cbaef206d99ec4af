"""What operators look at: metrics, health, logs, dead letters of all parts, and a doctor."""
